"""Qwen3, dense: q and k normalised per head."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.blocks import DENSE, OUTPUT, QKV, decoder_layer, qk_norms
from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    dense_shape,
    model_arguments,
    require,
)
from bridges.rotary import rotary_arguments


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms, gated dense layers."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    rotary, attributes = rotary_arguments(config)
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qk_norm=True),
        "ffn_hidden_size": config.intermediate_size,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read_shape=dense_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms(), OUTPUT),
    dense=DENSE,
)
