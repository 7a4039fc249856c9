"""Mixtral: experts in every layer, on disk as ``w1`` (gate), ``w3`` (up) and ``w2`` (down)."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import every_layer, expert_fields, moe_shape, require
from bridges.rows import OUTPUT, QKV, Copy, L, M, ModelShape, decoder_layer, experts


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    size = config.intermediate_size
    return moe_shape(config, experts=config.num_local_experts, size=size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with an optional window, softmax over the chosen experts."""
    require(config, "router_jitter_noise", (0, 0.0, None), "the trainer routes without noise")
    size = config.intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_local_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": False,
    }
    return grouped_query_model(config, fields)


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
