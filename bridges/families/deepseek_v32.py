"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer selects.

The model's loss has no gradient for the indexer. Its weights are constant unless a separate loss trains them.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from bridges.families import deepseek_v3
from bridges.family import Family, IndexerSizes, MegatronModelConfig
from bridges.hf_config import mla_shape, require
from bridges.rows import Copy, L, M, ModelShape

A, N = L + "self_attn.indexer.", M + "self_attention.core_attention.indexer."
ROWS = (
    Copy(N + "wq_b.weight", A + "wq_b.weight", "j R"),
    Copy(N + "wk.weight", A + "wk.weight", "i H"),
    Copy(N + "k_norm.weight", A + "k_norm.weight", "i"),
    Copy(N + "k_norm.bias", A + "k_norm.bias", "i"),
    Copy(N + "weights_proj.weight", A + "weights_proj.weight", "h H"),
)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return DeepSeek-V3's shape with the sizes of the indexer."""
    shape, heads, size = mla_shape(config), config.index_n_heads, config.index_head_dim
    return replace(shape, dims={**shape.dims, "h": heads, "i": size, "j": heads * size})


def megatron_config(config: PreTrainedConfig, *, interleaved: bool = False) -> MegatronModelConfig:
    """Return DeepSeek-V3's settings with the indexer. ``interleaved``: its rotary pairs are adjacent entries."""
    if config.q_lora_rank is None:
        require(config, "q_lora_rank", ("a number",), "the indexer projects compressed queries")
    model = deepseek_v3.megatron_config(config)
    indexer = IndexerSizes(config.index_n_heads, config.index_head_dim, config.index_topk, interleaved)
    return replace(model, attributes={**model.attributes, "indexer": indexer})


FAMILY = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    read_shape=model_shape,
    read_megatron=megatron_config,
    layer=(*deepseek_v3.FAMILY.layer, *ROWS),
    dense=deepseek_v3.FAMILY.dense,
    moe=deepseek_v3.FAMILY.moe,
)
