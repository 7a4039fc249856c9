"""GLM-4.5: leading dense layers, sigmoid routing with a correction bias, shared experts, partial rotary embedding."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    dense_first,
    expert_fields,
    model_arguments,
    moe_shape,
    sigmoid_routing,
)
from bridges.rotary import rotary_arguments
from bridges.rows import Copy, GateUp, ModelShape, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts from layer ``first_k_dense_replace`` on."""
    flags = {"qkv_bias": config.attention_bias, "qk_norm": config.use_qk_norm}
    size = config.moe_intermediate_size
    return moe_shape(
        config,
        *(flag for flag, on in flags.items() if on),
        experts=config.n_routed_experts,
        size=size,
        moe=dense_first(config),
        S=config.n_shared_experts * size,
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k/v biases, grouped sigmoid routing, shared experts."""
    rotary, attributes = rotary_arguments(config)
    size = config.moe_intermediate_size
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm),
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * size,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    embedding=(Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),),
    layer=(
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
        Qkv(
            M + "self_attention.linear_qkv.bias",
            tuple(L + f"self_attn.{x}_proj.bias" for x in "qkv"),
            "",
            when="qkv_bias",
        ),
        Copy(M + "self_attention.q_layernorm.weight", L + "self_attn.q_norm.weight", "D", when="qk_norm"),
        Copy(M + "self_attention.k_layernorm.weight", L + "self_attn.k_norm.weight", "D", when="qk_norm"),
        Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A"),
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    ),
    dense=(
        GateUp(M + "mlp.linear_fc1.weight", (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"), "F H"),
        Copy(M + "mlp.linear_fc2.weight", L + "mlp.down_proj.weight", "H F", split=1),
    ),
    moe=(
        Copy(M + "mlp.router.weight", L + "mlp.gate.weight", "E H"),
        Copy(M + "mlp.router.expert_bias", L + "mlp.gate.e_score_correction_bias", "E", buffer=True, keep_dtype=True),
        GateUp(
            M + "mlp.shared_experts.linear_fc1.weight",
            tuple(L + f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")),
            "S H",
        ),
        Copy(M + "mlp.shared_experts.linear_fc2.weight", L + "mlp.shared_experts.down_proj.weight", "H S", split=1),
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
