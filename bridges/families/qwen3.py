"""Qwen3, dense: q and k normalised per head."""

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
from bridges.rows import Copy, GateUp, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


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
    embedding=(Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),),
    layer=(
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
        Copy(M + "self_attention.q_layernorm.weight", L + "self_attn.q_norm.weight", "D"),
        Copy(M + "self_attention.k_layernorm.weight", L + "self_attn.k_norm.weight", "D"),
        Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A"),
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    ),
    dense=(
        GateUp(M + "mlp.linear_fc1.weight", (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"), "F H"),
        Copy(M + "mlp.linear_fc2.weight", L + "mlp.down_proj.weight", "H F", split=1),
    ),
    moe=(),
    head=(
        Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
        Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
    ),
)
