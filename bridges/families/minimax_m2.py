"""MiniMax-M2: experts in every layer, sigmoid routing with a correction bias, q and k normalised over all heads.

It has partial rotary embedding. On disk experts have Mixtral's names: ``w1`` (gate), ``w3`` (up) and ``w2`` (down).
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.family import Family, MegatronModelConfig, grouped_query_model
from bridges.hf_config import every_layer, expert_fields, moe_shape, require, sigmoid_routing
from bridges.rows import OUTPUT, QKV, Copy, L, M, ModelShape, correction, decoder_layer, experts, qk_norms


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Experts in every layer."""
    size = config.intermediate_size
    return moe_shape(config, experts=config.num_local_experts, size=size, moe=every_layer(config))


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Grouped-query attention with full-width q/k norms, sigmoid routing without groups."""
    require(config, "router_jitter_noise", (0, 0.0, None), "the trainer routes without noise")
    require(config, "use_routing_bias", (True,), "transformers always routes with the correction bias")
    require(config, "use_qk_norm", (True,), "transformers always normalises q and k")
    require(config, "shared_intermediate_size", (0, None), "transformers has no shared expert here")
    size = config.intermediate_size
    fields = {
        **expert_fields(config, experts=config.num_local_experts, size=size, moe=every_layer(config)),
        **sigmoid_routing(config),
        "ffn_hidden_size": size,
    }
    return grouped_query_model(config, fields, qk_norm=True, full_width_qk_norm=True)


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=decoder_layer(QKV, *qk_norms("Q", "K"), OUTPUT),
    moe=(
        Copy(M + "mlp.router.weight", L + "block_sparse_moe.gate.weight", "E H"),
        correction("block_sparse_moe.e_score_correction_bias"),
        *experts("block_sparse_moe.experts.", gate="w1", up="w3", down="w2"),
    ),
)
