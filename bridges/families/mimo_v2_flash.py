"""MiMo-V2-Flash: sigmoid routing with a correction bias, and heads that differ by layer.

Sliding-window layers have twice as many KV groups, sinks and a different rotary base. Values are narrower than keys,
and scaled. Tensors ``model.mtp.`` are for multi-token prediction.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, VaryingHeads
from bridges.hf_config import (
    attention_fields,
    base_transformer,
    dense_first,
    expert_fields,
    mixers,
    model_arguments,
    moe_shape,
    refuse,
    require,
    sigmoid_routing,
)
from bridges.rows import CORRECTION, DENSE, ROUTER, WINDOW, Copy, L, M, ModelShape, Qkv, decoder_layer, experts

N = M + "self_attention."
PROJECTIONS = tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv")
WINDOW_GROUPS = 2
"""Ratio of KV groups in layers with and without a window, hard-coded in transformers."""


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the shape: experts in the sparse layers of ``mlp_layer_types``."""
    return moe_shape(
        config,
        experts=config.n_routed_experts,
        size=config.moe_intermediate_size,
        moe=dense_first(config),
        mixers=mixers(config, WINDOW),
        g=WINDOW_GROUPS * config.num_key_value_heads,
        d=config.v_head_dim,
        O=config.num_attention_heads * config.v_head_dim,
    )


def window(config: PreTrainedConfig) -> int:
    """Return the window of W tokens, the query among them: vLLM's, which reads ``sliding_window_size``.

    transformers from 5.20 on counts that many tokens besides the query, and saves ``sliding_window`` as one more.
    """
    size = getattr(config, "sliding_window_size", None) or config.sliding_window
    if config.sliding_window not in (size, size + 1):
        reason = f"sliding_window_size is {size}, by which engines sample: set both to one number"
        raise refuse(config.model_type, "sliding_window", config.sliding_window, reason)
    return int(size)


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention that differs by layer, sigmoid routing."""
    config.sliding_window = window(config)
    require(config, "attention_bias", (False,), "the table has no rows for biases of q, k and v")
    groups = WINDOW_GROUPS * config.num_key_value_heads
    if config.num_attention_heads % groups:
        reason = f"layers with a window have {groups} KV groups, which must divide {config.num_attention_heads} heads"
        raise refuse(config.model_type, "num_key_value_heads", config.num_key_value_heads, reason)
    size, full, windowed = config.moe_intermediate_size, "full_attention", "sliding_attention"
    rotary = config.rope_parameters
    for kind in (full, windowed):
        if (rope_type := rotary[kind].get("rope_type", "default")) != "default":
            raise refuse(config.model_type, f"rope_parameters.{kind}.rope_type", rope_type, "use default")
    percents = {kind: rotary[kind].get("partial_rotary_factor", 0.334) for kind in (full, windowed)}
    if percents[full] != percents[windowed]:
        key = f"rope_parameters.{windowed}.partial_rotary_factor"
        raise refuse(config.model_type, key, percents[windowed], f"use {percents[full]} as for {full}")
    fields = {
        **base_transformer(config),
        **attention_fields(config),
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": config.intermediate_size,
    }
    heads = VaryingHeads(
        value_size=config.v_head_dim,
        value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale,
        window_groups=groups,
        window_rotary_base=rotary[windowed]["rope_theta"],
        rotary_percent=percents[full],
    )
    arguments = model_arguments(
        config,
        position_embedding_type="rope",
        rotary_base=rotary[full]["rope_theta"],
        rotary_percent=percents[full],
    )
    return MegatronModelConfig(fields, arguments, {"heads_by_layer": heads})


FAMILY = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(Copy(N + "linear_proj.weight", L + "self_attn.o_proj.weight", "H O", split=1, units="A")),
    attention=(Qkv(N + "linear_qkv.weight", PROJECTIONS, "H", value="d"),),
    window=(
        Qkv(N + "linear_qkv.weight", PROJECTIONS, "H", units="g", value="d"),
        Copy(N + "core_attention.softmax_offset", L + "self_attn.attention_sink_bias", "A", split=0, units="A"),
    ),
    dense=DENSE,
    moe=(ROUTER, CORRECTION, *experts()),
    carried=("model.mtp.",),
)
