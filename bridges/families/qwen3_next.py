"""Qwen3-Next: gated delta nets, attention with an output gate in every fourth layer, a gated shared expert.

Norm weights are stored minus 1, except inside the delta nets. On disk q, k, v and gate (``qkvz``), and learning rate
and step (``ba``), are each one tensor with rows ordered by key head. Tensors ``mtp.`` are for multi-token prediction.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import (
    delta_net_dims,
    delta_net_fields,
    expert_fields,
    mixers,
    moe_shape,
    require,
    sparse_steps,
)
from bridges.rows import (
    DELTA_NET,
    DENSE,
    OUTPUT,
    ROUTER,
    ByKeyHead,
    Copy,
    GatedQkv,
    L,
    M,
    ModelShape,
    Row,
    decoder_layer,
    experts,
    qk_norms,
    shared_expert,
)

A, N = L + "linear_attn.", M + "self_attention."
GATED_ATTENTION = (
    GatedQkv(N + "linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
    *qk_norms(),
    OUTPUT,
)
EXPERTS = (
    ROUTER,
    Copy(M + "mlp.shared_experts.gate_weight", L + "mlp.shared_expert_gate.weight", "1 H"),
    *shared_expert("mlp.shared_expert."),
    *experts(),
)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer but those of ``mlp_only_layers`` and between sparse steps."""
    return moe_shape(
        config,
        experts=config.num_experts,
        size=config.moe_intermediate_size,
        moe=sparse_steps(config),
        mixers=mixers(config, DELTA_NET),
        S=config.shared_expert_intermediate_size,
        **delta_net_dims(config),
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Gated delta nets and gated attention, softmax routing, a gated shared expert."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=sparse_steps(config)),
        **delta_net_fields(config),
        "attention_output_gate": True,
        "ffn_hidden_size": config.intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    return grouped_query_model(config, fields, qk_norm=True)


def delta_net(*projections: Row) -> tuple[Row, ...]:
    """Return the rows of a gated delta net; ``projections``: the rows of its input projection."""
    return (
        *projections,
        ByKeyHead(N + "conv_weight", A + "conv1d.weight", "1 t", sections=(("k", "k", "w"),)),
        Copy(N + "A_log", A + "A_log", "m", split=0, units="n"),
        Copy(N + "dt_bias", A + "dt_bias", "m", split=0, units="n"),
        Copy(N + "out_norm.weight", A + "norm.weight", "v"),
        Copy(N + "linear_out.weight", A + "out_proj.weight", "H o", split=1, units="n"),
    )


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(),
    attention=GATED_ATTENTION,
    delta_net=delta_net(
        ByKeyHead(
            N + "linear_in.weight",
            (A + "in_proj_qkvz.weight", A + "in_proj_ba.weight"),
            "H",
            sections=(("x",), ("2r",)),
            matrices=("k", "k", "w", "w", "r", "r"),
        ),
    ),
    dense=DENSE,
    moe=EXPERTS,
    carried=("mtp.",),
)
