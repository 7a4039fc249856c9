"""Llama 2 and 3, dense. Biases, where the config asks for them, on every matrix or on none."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    dense_shape,
    model_arguments,
    require,
)
from bridges.rotary import rotary_arguments
from bridges.rows import Copy, GateUp, ModelShape, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """``biased``: attention and feed-forward matrices have biases."""
    return dense_shape(config, *(["biased"] if config.attention_bias else []))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention, gated dense layers."""
    require(config, "mlp_bias", (config.attention_bias,), "Megatron has one switch for both: equal to attention_bias")
    rotary, attributes = rotary_arguments(config)
    transformer = {
        **base_transformer(config),
        **attention_fields(config),
        "ffn_hidden_size": config.intermediate_size,
        "add_bias_linear": config.attention_bias,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    embedding=(Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),),
    layer=(
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
        Qkv(
            M + "self_attention.linear_qkv.bias",
            tuple(L + f"self_attn.{x}_proj.bias" for x in "qkv"),
            "",
            when="biased",
        ),
        Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A"),
        Copy(M + "self_attention.linear_proj.bias", L + "self_attn.o_proj.bias", "H", when="biased"),
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    ),
    dense=(
        GateUp(M + "mlp.linear_fc1.weight", (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"), "F H"),
        GateUp(M + "mlp.linear_fc1.bias", (L + "mlp.gate_proj.bias", L + "mlp.up_proj.bias"), "F", when="biased"),
        Copy(M + "mlp.linear_fc2.weight", L + "mlp.down_proj.weight", "H F", split=1),
        Copy(M + "mlp.linear_fc2.bias", L + "mlp.down_proj.bias", "H", when="biased"),
    ),
    moe=(),
    head=(
        Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
        Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
    ),
)
