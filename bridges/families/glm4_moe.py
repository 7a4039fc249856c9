"""GLM-4.5: leading dense layers, sigmoid routing with a correction bias, shared experts, partial rotary embedding."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_first, expert_fields, moe_shape, sigmoid_routing
from bridges.rows import (
    CORRECTION,
    DENSE,
    DRAFT,
    OUTPUT,
    QKV,
    ROUTER,
    ModelShape,
    decoder_layer,
    experts,
    qk_norms,
    qkv_bias,
    shared_expert,
)


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
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * size,
    }
    return grouped_query_model(config, fields, qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(when="qkv_bias"), *qk_norms(when="qk_norm"), OUTPUT),
    dense=DENSE,
    moe=(ROUTER, CORRECTION, *shared_expert(), *experts()),
    draft=DRAFT,
)
