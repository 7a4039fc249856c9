"""gpt-oss: attention sinks, alternating sliding windows, biases everywhere, clamped SwiGLU, YaRN.

On disk all experts of a layer share one tensor, matrices are transposed and gate and up columns alternate.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import every_layer, expert_fields, moe_shape, require
from bridges.rows import (
    OUTPUT,
    QKV,
    Copy,
    InterleavedGateUp,
    L,
    M,
    ModelShape,
    Transposed,
    decoder_layer,
    output_bias,
    qkv_bias,
)

X, Y = L + "mlp.experts.", M + "mlp.experts.{expert}."


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    size = config.intermediate_size
    return moe_shape(config, experts=config.num_local_experts, size=size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with sinks and windows, softmax over the chosen experts."""
    require(config, "attention_bias", (True,), "the experts have biases, and Megatron has one switch for all")
    require(config, "swiglu_alpha", (1.702,), "Megatron's quick_gelu hard-codes 1.702")
    size = config.intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_local_experts, size=size, moe=every_layer(config)),
        "ffn_hidden_size": size,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.swiglu_limit,
        "moe_router_pre_softmax": False,
    }
    return grouped_query_model(config, fields, activation="quick_gelu")


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(
        QKV,
        qkv_bias(),
        Copy(M + "self_attention.core_attention.softmax_offset", L + "self_attn.sinks", "A", split=0, units="A"),
        OUTPUT,
        output_bias(),
    ),
    moe=(
        Copy(M + "mlp.router.weight", L + "mlp.router.weight", "E H"),
        Copy(M + "mlp.router.bias", L + "mlp.router.bias", "E"),
        InterleavedGateUp(Y + "linear_fc1.weight", X + "gate_up_proj", "H 2M", stacked=True),
        InterleavedGateUp(Y + "linear_fc1.bias", X + "gate_up_proj_bias", "2M", stacked=True),
        Transposed(Y + "linear_fc2.weight", X + "down_proj", "M H", split=1, stacked=True),
        Copy(Y + "linear_fc2.bias", X + "down_proj_bias", "H", stacked=True),
    ),
)
