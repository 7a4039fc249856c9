"""Rows that families share: a decoder layer as Llama names it on disk, and experts one by one."""

from __future__ import annotations

from bridges.rows import Copy, GateUp, Qkv, Row

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."
"""Where the tensors of a layer stand in HF's names and in Megatron's."""

EMBEDDING = (Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),)
HEAD = (
    Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
    Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
)
QKV = Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H")
OUTPUT = Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A")
DENSE = (
    GateUp(M + "mlp.linear_fc1.weight", (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"), "F H"),
    Copy(M + "mlp.linear_fc2.weight", L + "mlp.down_proj.weight", "H F", split=1),
)
ROUTER = Copy(M + "mlp.router.weight", L + "mlp.gate.weight", "E H")


def correction(hf: str = "mlp.gate.e_score_correction_bias") -> Row:
    """Return the row of the bias of DeepSeek-V3's router, added to the scores that experts are chosen by
    (arXiv:2412.19437, 2.1.2)."""
    return Copy(M + "mlp.router.expert_bias", L + hf, "E", buffer=True, keep_dtype=True)


CORRECTION = correction()
DRAFT = (
    Copy(M + "enorm.weight", L + "enorm.weight", "H"),
    Copy(M + "hnorm.weight", L + "hnorm.weight", "H"),
    Copy(M + "eh_proj.weight", L + "eh_proj.weight", "H 2H", split=0),
    Copy(M + "final_layernorm.weight", L + "shared_head.norm.weight", "H"),
)
"""What DeepSeek-V3's layer of multi-token prediction has beside a decoder layer (arXiv:2412.19437, 2.2)."""
DRAFT_COPIES = {
    L + "embed_tokens.weight": "model.embed_tokens.weight",
    L + "shared_head.head.weight": "lm_head.weight",
}
"""Tensors that released folders store with that layer once more, although it shares the model's."""


def decoder_layer(*attention: Row) -> tuple[Row, ...]:
    """Return the rows of every layer: ``attention`` between the norms before it and before the feed-forward part."""
    return (
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        *attention,
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    )


def qkv_bias(when: str | None = None) -> Row:
    """Return the row of the biases on q, k and v."""
    return Qkv(
        M + "self_attention.linear_qkv.bias", tuple(L + f"self_attn.{x}_proj.bias" for x in "qkv"), "", when=when
    )


def output_bias(when: str | None = None) -> Row:
    """Return the row of the bias behind attention."""
    return Copy(M + "self_attention.linear_proj.bias", L + "self_attn.o_proj.bias", "H", when=when)


def qk_norms(q: str = "D", k: str = "D", when: str | None = None) -> tuple[Row, ...]:
    """Return the rows of the norms of q and k, of sizes ``q`` and ``k``: per head, unless given."""
    return tuple(
        Copy(M + f"self_attention.{x}_layernorm.weight", L + f"self_attn.{x}_norm.weight", size, when=when)
        for x, size in (("q", q), ("k", k))
    )


def experts(
    hf: str = "mlp.experts.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, ...]:
    """Return the rows of experts that stand on disk one by one below ``hf``."""
    megatron, one = M + "mlp.experts.{expert}.", L + hf + "{expert}."
    return (
        GateUp(megatron + "linear_fc1.weight", (f"{one}{gate}.weight", f"{one}{up}.weight"), "M H"),
        Copy(megatron + "linear_fc2.weight", f"{one}{down}.weight", "H M", split=1),
    )


def shared_expert(hf: str = "mlp.shared_experts.", when: str | None = None) -> tuple[Row, ...]:
    """Return the rows of the shared experts, which are one module."""
    megatron, one = M + "mlp.shared_experts.", L + hf
    return (
        GateUp(megatron + "linear_fc1.weight", (one + "gate_proj.weight", one + "up_proj.weight"), "S H", when=when),
        Copy(megatron + "linear_fc2.weight", one + "down_proj.weight", "H S", split=1, when=when),
    )
