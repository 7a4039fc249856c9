"""Qwen3, dense: q and k normalised per head."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_shape, require
from bridges.rows import DENSE, OUTPUT, QKV, decoder_layer, qk_norms


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms, gated dense layers."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    fields = {"ffn_hidden_size": config.intermediate_size}
    return grouped_query_model(config, fields, qk_norm=True)


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read_shape=dense_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms(), OUTPUT),
    dense=DENSE,
)
