"""Hunyuan 3: Qwen3's attention, leading dense layers, sigmoid routing with a correction bias, a shared expert."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_first, expert_fields, moe_shape, require, sigmoid_routing
from bridges.rows import (
    DENSE,
    OUTPUT,
    QKV,
    Copy,
    L,
    M,
    ModelShape,
    correction,
    decoder_layer,
    experts,
    qk_norms,
    shared_expert,
)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the shape: experts in the sparse layers of ``mlp_layer_types``."""
    size = config.moe_intermediate_size
    return moe_shape(
        config, experts=config.num_experts, size=size, moe=dense_first(config), S=config.num_shared_experts * size
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms, sigmoid routing without groups, a shared expert."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    require(config, "mlp_bias", (False,), "Megatron has no switch for biases in dense layers only")
    require(config, "qk_norm", (True,), "transformers always normalises q and k")
    require(config, "route_norm", (True,), "transformers always normalises the scores")
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config, scaling="router_scaling_factor"),
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": config.num_shared_experts * size,
    }
    return grouped_query_model(config, fields, qk_norm=True)


FAMILY = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms(), OUTPUT),
    dense=DENSE,
    moe=(
        Copy(M + "mlp.router.weight", L + "mlp.router.gate.weight", "E H"),
        correction("mlp.expert_bias"),
        *shared_expert("mlp.shared_mlp."),
        *experts(),
    ),
)
