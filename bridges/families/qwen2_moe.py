"""Qwen1.5 and Qwen2 MoE: biases on q, k and v, a shared expert with a sigmoid gate."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import expert_fields, moe_shape, sparse_steps
from bridges.rows import (
    DENSE,
    OUTPUT,
    QKV,
    ROUTER,
    Copy,
    L,
    M,
    ModelShape,
    decoder_layer,
    experts,
    qkv_bias,
    shared_expert,
)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer but those of ``mlp_only_layers`` and between sparse steps."""
    return moe_shape(
        config,
        *(["qkv_bias"] if config.qkv_bias else []),
        experts=config.num_experts,
        size=config.moe_intermediate_size,
        moe=sparse_steps(config),
        S=config.shared_expert_intermediate_size,
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with q/k/v biases, softmax routing, a gated shared expert."""
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=sparse_steps(config)),
        "ffn_hidden_size": config.intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    return grouped_query_model(config, fields, qkv_bias=config.qkv_bias)


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, qkv_bias(when="qkv_bias"), OUTPUT),
    dense=DENSE,
    moe=(
        ROUTER,
        Copy(M + "mlp.shared_experts.gate_weight", L + "mlp.shared_expert_gate.weight", "1 H"),
        *shared_expert("mlp.shared_expert."),
        *experts(),
    ),
)
