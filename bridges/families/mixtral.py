"""Mixtral: experts in every layer, on disk as ``w1`` (gate), ``w3`` (up) and ``w2`` (down)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.blocks import OUTPUT, QKV, L, M, decoder_layer, experts
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
from bridges.rows import Copy, ModelShape


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    size = config.intermediate_size
    return moe_shape(config, experts=config.num_local_experts, size=size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with an optional window, softmax over the chosen experts."""
    require(config, "router_jitter_noise", (0, 0.0, None), "the trainer routes without noise")
    rotary, attributes = rotary_arguments(config)
    size = config.intermediate_size
    transformer = {
        **base_transformer(config),
        **attention_fields(config),
        **expert_fields(config, experts=config.num_local_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": False,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, OUTPUT),
    moe=(
        Copy(M + "mlp.router.weight", L + "block_sparse_moe.gate.weight", "E H"),
        *experts("block_sparse_moe.experts.", gate="w1", up="w3", down="w2"),
    ),
)
