"""OLMoE: experts in every layer; q and k are normalised over all heads together."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    every_layer,
    expert_fields,
    model_arguments,
    moe_shape,
    require,
)
from bridges.rotary import rotary_arguments
from bridges.rows import Copy, GateUp, ModelShape, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    return moe_shape(config, experts=config.num_experts, size=config.intermediate_size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with full-width q/k norms, softmax routing."""
    require(config, "clip_qkv", (None,), "Megatron does not clip q, k and v")
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    rotary, attributes = rotary_arguments(config)
    size = config.intermediate_size
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qk_norm=True),
        **expert_fields(config, experts=config.num_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
    arguments = model_arguments(config, **rotary)
    return MegatronModelConfig(transformer, arguments, attributes, full_width_qk_norm=True)


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    embedding=(Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),),
    layer=(
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
        # Whole on every rank: a norm over all heads needs all weights' gradients summed over tp.
        Copy(M + "self_attention.q_layernorm.weight", L + "self_attn.q_norm.weight", "Q"),
        Copy(M + "self_attention.k_layernorm.weight", L + "self_attn.k_norm.weight", "K"),
        Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A"),
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    ),
    dense=(),
    moe=(
        Copy(M + "mlp.router.weight", L + "mlp.gate.weight", "E H"),
        GateUp(
            M + "mlp.experts.{expert}.linear_fc1.weight",
            tuple(L + f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up")),
            "M H",
        ),
        Copy(
            M + "mlp.experts.{expert}.linear_fc2.weight",
            L + "mlp.experts.{expert}.down_proj.weight",
            "H M",
            split=1,
        ),
    ),
    head=(
        Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
        Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
    ),
)
