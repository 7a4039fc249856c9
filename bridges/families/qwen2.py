"""Qwen2 and Qwen2.5, dense: biases on q, k and v; small sizes tie the embeddings."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_shape
from bridges.rows import DENSE, OUTPUT, QKV, decoder_layer, qkv_bias


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k/v biases, gated dense layers."""
    fields = {"ffn_hidden_size": config.intermediate_size}
    return grouped_query_model(config, fields, qkv_bias=True)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read_shape=dense_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(), OUTPUT),
    dense=DENSE,
)
