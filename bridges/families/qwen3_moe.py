"""Qwen3 MoE: q and k normalised per head; every layer holds experts unless the config says otherwise."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    expert_fields,
    model_arguments,
    moe_shape,
    require,
    sparse_steps,
)
from bridges.rotary import rotary_arguments
from bridges.rows import Copy, GateUp, ModelShape, Qkv

L, M = "model.layers.{layer}.", "decoder.layers.{layer}."


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer but those of ``mlp_only_layers`` and between sparse steps."""
    size = config.moe_intermediate_size
    return moe_shape(config, experts=config.num_experts, size=size, moe=sparse_steps(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms, softmax routing."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    rotary, attributes = rotary_arguments(config)
    size = config.moe_intermediate_size
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qk_norm=True),
        **expert_fields(config, experts=config.num_experts, size=size, moe=sparse_steps(config)),
        "ffn_hidden_size": config.intermediate_size,
        # Megatron normalises the chosen probabilities exactly if it takes the softmax after choosing.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
    return MegatronModelConfig(transformer, model_arguments(config, **rotary), attributes)


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_shape=model_shape,
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
    moe=(
        Copy(M + "mlp.router.weight", L + "mlp.gate.weight", "E H"),
        GateUp(
            M + "mlp.experts.{expert}.linear_fc1.weight",
            tuple(L + f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up")),
            "M H",
        ),
        Copy(
            M + "mlp.experts.{expert}.linear_fc2.weight",
            L + "mlp.experts.{expert}.down_proj.weight",
            "H M",
            split=1,
        ),
    ),
    head=(
        Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
        Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
    ),
)
