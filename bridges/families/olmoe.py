"""OLMoE: experts in every layer; q and k are normalised over all heads together."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.blocks import OUTPUT, QKV, ROUTER, decoder_layer, experts, qk_norms
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
from bridges.rows import ModelShape


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    return moe_shape(config, experts=config.num_experts, size=config.intermediate_size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with full-width q/k norms, softmax routing."""
    require(config, "clip_qkv", (None,), "Megatron does not clip q, k and v")
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    rotary, attributes = rotary_arguments(config)
    size = config.intermediate_size
    transformer = {
        **base_transformer(config),
        **attention_fields(config, qk_norm=True),
        **expert_fields(config, experts=config.num_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
    arguments = model_arguments(config, **rotary)
    return MegatronModelConfig(transformer, arguments, attributes, full_width_qk_norm=True)


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    # q and k norms are whole on every rank: a norm over all heads needs all weights' gradients summed over tp.
    layer=decoder_layer(QKV, *qk_norms("Q", "K"), OUTPUT),
    moe=(ROUTER, *experts()),
)
