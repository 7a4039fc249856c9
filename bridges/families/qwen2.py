"""Qwen2 and Qwen2.5, dense: biases on q, k and v; small sizes tie the embeddings."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.blocks import DENSE, OUTPUT, QKV, decoder_layer, qkv_bias
from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import attention_fields, base_transformer, dense_shape, model_arguments
from bridges.rotary import rotary_arguments


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k/v biases, gated dense layers."""
    rotary, attributes = rotary_arguments(config)
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qkv_bias=True),
        "ffn_hidden_size": config.intermediate_size,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read_shape=dense_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(), OUTPUT),
    dense=DENSE,
)
