"""ERNIE 4.5: leading dense layers, softmax scores with a correction bias, shared experts, interleaved rotary pairs."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import expert_fields, moe_shape, require, sigmoid_routing
from bridges.rows import (
    DENSE,
    OUTPUT,
    QKV,
    ROUTER,
    L,
    M,
    ModelShape,
    Unsqueezed,
    decoder_layer,
    experts,
    shared_expert,
)


def moe_layers(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return which layers have experts: every ``moe_layer_interval``-th layer of a range."""
    held = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    return tuple(
        layer in held and (layer + 1) % config.moe_layer_interval == 0 for layer in range(config.num_hidden_layers)
    )


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the shape: experts in a range of layers, optional shared experts."""
    size = config.moe_intermediate_size
    return moe_shape(
        config,
        *(["shared"] if config.moe_num_shared_experts else []),
        experts=config.moe_num_experts,
        size=size,
        moe=moe_layers(config),
        S=config.moe_num_shared_experts * size,
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention, softmax routing with a bias as sigmoid routing of log-odds, shared experts."""
    require(config, "use_bias", (False,), "Megatron's shared experts have no biases")
    require(config, "moe_norm_min", (1e-12,), "Megatron hard-codes the epsilon of the normalisation")
    size, shared = config.moe_intermediate_size, config.moe_num_shared_experts
    fields = {
        **expert_fields(config, experts=config.moe_num_experts, size=size, moe=moe_layers(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": shared * size if shared else None,
        "rotary_interleaved": True,
    }
    return grouped_query_model(config, fields, softmax_log_odds=True)


FAMILY = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, OUTPUT),
    dense=DENSE,
    moe=(
        ROUTER,
        Unsqueezed(
            M + "mlp.router.expert_bias",
            L + "mlp.moe_statics.e_score_correction_bias",
            "1 E",
            buffer=True,
            keep_dtype=True,
        ),
        *shared_expert(when="shared"),
        *experts(),
    ),
    carried=("model.mtp_",),
)
