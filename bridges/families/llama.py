"""Llama 2 and 3, dense. Either all linear layers have biases or none."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import dense_shape, require
from bridges.rows import DENSE, OUTPUT, QKV, Copy, GateUp, L, M, ModelShape, decoder_layer, output_bias, qkv_bias


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """``biased``: attention and feed-forward matrices have biases."""
    return dense_shape(config, *(["biased"] if config.attention_bias else []))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention, gated dense layers."""
    require(config, "mlp_bias", (config.attention_bias,), "Megatron has one switch for mlp_bias and attention_bias")
    fields = {
        "ffn_hidden_size": config.intermediate_size,
        "add_bias_linear": config.attention_bias,
    }
    return grouped_query_model(config, fields)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(when="biased"), OUTPUT, output_bias(when="biased")),
    dense=(
        DENSE[0],
        GateUp(M + "mlp.linear_fc1.bias", (L + "mlp.gate_proj.bias", L + "mlp.up_proj.bias"), "F", when="biased"),
        DENSE[1],
        Copy(M + "mlp.linear_fc2.bias", L + "mlp.down_proj.bias", "H", when="biased"),
    ),
)
