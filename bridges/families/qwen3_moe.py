"""Qwen3 MoE: q and k normalised per head; by default every layer has experts."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import expert_fields, moe_shape, require, sparse_steps
from bridges.rows import DENSE, OUTPUT, QKV, ROUTER, ModelShape, decoder_layer, experts, qk_norms


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer but those of ``mlp_only_layers`` and between sparse steps."""
    size = config.moe_intermediate_size
    return moe_shape(config, experts=config.num_experts, size=size, moe=sparse_steps(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k norms, softmax routing."""
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=sparse_steps(config)),
        "ffn_hidden_size": config.intermediate_size,
        # Megatron normalises the selected probabilities if and only if the softmax follows the selection.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
    return grouped_query_model(config, fields, qk_norm=True)


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms(), OUTPUT),
    dense=DENSE,
    moe=(ROUTER, *experts()),
)
