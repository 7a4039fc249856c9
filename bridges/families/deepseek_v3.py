"""DeepSeek-V3, Moonlight and Kimi-K2: multi-latent attention, leading dense layers, grouped sigmoid routing."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, mla_rotary
from bridges.hf_config import (
    base_transformer,
    dense_first,
    expert_fields,
    mla_shape,
    model_arguments,
    require,
    sigmoid_routing,
)
from bridges.rows import (
    CORRECTION,
    DENSE,
    DRAFT,
    ROUTER,
    Copy,
    L,
    M,
    RopeRows,
    Row,
    decoder_layer,
    experts,
    shared_expert,
)

A, N = L + "self_attn.", M + "self_attention."


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Return the settings of multi-latent attention, with or without compressed queries, and shared experts."""
    require(config, "attention_bias", (False,), "Megatron's MLA down projections have no bias")
    size = config.moe_intermediate_size
    transformer = {
        **base_transformer(config),
        **expert_fields(config, experts=config.n_routed_experts, size=size, moe=dense_first(config)),
        **sigmoid_routing(config),
        **mla_rotary(config),
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * size,
    }
    arguments = model_arguments(config, position_embedding_type="rope")
    # transformers ignores rms_norm_eps for both latent norms and uses its default.
    return MegatronModelConfig(transformer, arguments, multi_latent_attention=True, mla_norm_epsilon=1e-6)


def rotary(megatron: str, hf: str, shape: str, *, heads: str = "1", when: str = "", **split: Any) -> tuple[Row, Row]:
    """Return rows of a rotary matrix: pairs (rope_interleave, as released) are copied, halves are permuted."""
    return (
        Copy(megatron, hf, shape, split=0, when=when + "pairs", **split),
        RopeRows(megatron, hf, shape, split=0, when=when + "halves", heads=heads, **split),
    )


FAMILY = Family(
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    read_shape=mla_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(
        *rotary(N + "linear_q_proj.weight", A + "q_proj.weight", "U H", heads="A", when="q_", units="A"),
        Copy(
            N + "linear_q_down_proj.weight", A + "q_a_proj.weight", "R H", split=0, whole_under_te=True, when="q_lora"
        ),
        Copy(N + "q_layernorm.weight", A + "q_a_layernorm.weight", "R", when="q_lora"),
        *rotary(N + "linear_q_up_proj.weight", A + "q_b_proj.weight", "U R", heads="A", when="q_lora_", units="A"),
        *rotary(N + "linear_kv_down_proj.weight", A + "kv_a_proj_with_mqa.weight", "B H", whole_under_te=True),
        Copy(N + "kv_layernorm.weight", A + "kv_a_layernorm.weight", "C"),
        Copy(N + "linear_kv_up_proj.weight", A + "kv_b_proj.weight", "W C", split=0, units="A"),
        Copy(N + "linear_proj.weight", A + "o_proj.weight", "H O", split=1, units="A"),
    ),
    dense=DENSE,
    moe=(ROUTER, CORRECTION, *shared_expert(), *experts()),
    draft=DRAFT,
)
