"""Solar Open: GLM-4.5's experts in every layer, attention without q/k norms."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import every_layer, expert_fields, moe_shape, sigmoid_routing
from bridges.rows import CORRECTION, OUTPUT, QKV, ROUTER, ModelShape, decoder_layer, experts, qkv_bias, shared_expert


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    size = config.moe_intermediate_size
    return moe_shape(
        config,
        *(["qkv_bias"] if config.attention_bias else []),
        experts=config.n_routed_experts,
        size=size,
        moe=every_layer(config),
        S=config.n_shared_experts * size,
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with optional q/k/v biases, grouped sigmoid routing, shared experts."""
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=every_layer(config)),
        **sigmoid_routing(config),
        "moe_shared_expert_intermediate_size": config.n_shared_experts * size,
    }
    return grouped_query_model(config, fields, qkv_bias=config.attention_bias)


FAMILY = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(when="qkv_bias"), OUTPUT),
    moe=(ROUTER, CORRECTION, *shared_expert(), *experts()),
)
