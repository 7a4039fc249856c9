"""The language model of Qwen3.5 MoE: Qwen3-Next with a separate projection for each input of a delta net."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.families.qwen3_next import EXPERTS, GATED_ATTENTION, A, N, delta_net
from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import (
    delta_net_dims,
    delta_net_fields,
    every_layer,
    expert_fields,
    mixers,
    moe_shape,
    require,
)
from bridges.rows import DELTA_NET, ByKeyHead, ModelShape, decoder_layer


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    return moe_shape(
        config,
        experts=config.num_experts,
        size=config.moe_intermediate_size,
        moe=every_layer(config),
        mixers=mixers(config, DELTA_NET),
        S=config.shared_expert_intermediate_size,
        **delta_net_dims(config),
    )


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Gated delta nets and gated attention, softmax routing, a gated shared expert.

    Text has equal positions on all three axes of ``mrope_section``, which is then plain rotary embedding.
    """
    require(config, "attention_bias", (False,), "Megatron has no switch for a bias on all four projections")
    require(config, "norm_topk_prob", (True,), "transformers always normalises the scores")
    size = config.moe_intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_experts, size=size, moe=every_layer(config)),
        **delta_net_fields(config),
        "attention_output_gate": True,
        "ffn_hidden_size": size,
        "moe_router_pre_softmax": False,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    return grouped_query_model(config, fields, qk_norm=True)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(),
    attention=GATED_ATTENTION,
    delta_net=delta_net(
        ByKeyHead(
            N + "linear_in.weight",
            tuple(A + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            "H",
            sections=(("k", "k", "w"), ("w",), ("r",), ("r",)),
        ),
    ),
    moe=EXPERTS,
    carried=("mtp.",),
    within=("qwen3_5_moe",),
)
