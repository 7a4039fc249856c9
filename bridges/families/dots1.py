"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts: leading dense layers, sigmoid routing with a correction
bias, shared experts."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_first, expert_fields, moe_shape, refuse, require, sigmoid_routing
from bridges.rows import (
    CORRECTION,
    DENSE,
    OUTPUT,
    QKV,
    ROUTER,
    ModelShape,
    decoder_layer,
    experts,
    qk_norms,
    shared_expert,
)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts from layer ``first_k_dense_replace`` on."""
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if not getattr(config, key):
            raise refuse(
                config.model_type, key, getattr(config, key), "transformers has no default for it: give a number"
            )
    size = config.moe_intermediate_size
    return moe_shape(
        config,
        experts=config.n_routed_experts,
        size=size,
        moe=dense_first(config),
        S=config.n_shared_experts * size,
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms and optional windows, grouped sigmoid routing, shared experts."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * size,
    }
    return grouped_query_model(config, fields, qk_norm=True)


FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms(), OUTPUT),
    dense=DENSE,
    moe=(ROUTER, CORRECTION, *shared_expert(), *experts()),
)
