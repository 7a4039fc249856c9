"""Mixtral: experts in every layer, on disk as ``w1`` (gate), ``w3`` (up) and ``w2`` (down)."""

from __future__ import annotations

from transformers import PreTrainedConfig

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
from bridges.rows import Copy, GateUp, ModelShape, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


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
    embedding=(Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),),
    layer=(
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H"),
        Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A"),
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    ),
    dense=(),
    moe=(
        Copy(M + "mlp.router.weight", L + "block_sparse_moe.gate.weight", "E H"),
        GateUp(
            M + "mlp.experts.{expert}.linear_fc1.weight",
            tuple(L + f"block_sparse_moe.experts.{{expert}}.{x}.weight" for x in ("w1", "w3")),
            "M H",
        ),
        Copy(
            M + "mlp.experts.{expert}.linear_fc2.weight",
            L + "block_sparse_moe.experts.{expert}.w2.weight",
            "H M",
            split=1,
        ),
    ),
    head=(
        Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
        Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
    ),
)
