"""OLMoE: experts in every layer; q and k are normalised over all heads together."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import every_layer, expert_fields, moe_shape, require
from bridges.rows import OUTPUT, QKV, ROUTER, ModelShape, decoder_layer, experts, qk_norms


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    return moe_shape(config, experts=config.num_experts, size=config.intermediate_size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with full-width q/k norms, softmax routing."""
    require(config, "clip_qkv", (None,), "Megatron does not clip q, k and v")
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    size = config.intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
    return grouped_query_model(config, fields, qk_norm=True, full_width_qk_norm=True)


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    # q and k norms are replicated: a norm over all heads needs the gradients of all weights summed over tp.
    layer=decoder_layer(QKV, *qk_norms("Q", "K"), OUTPUT),
    moe=(ROUTER, *experts()),
)
