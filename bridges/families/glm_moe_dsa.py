"""GLM-5: DeepSeek-V3.2 with interleaved rotary pairs in the indexer."""

from __future__ import annotations

from transformers import PreTrainedConfig

from bridges.families import deepseek_v32
from bridges.family import Family, MegatronModelConfig
from bridges.hf_config import refuse


def megatron_config(config: PreTrainedConfig) -> MegatronModelConfig:
    """Return DeepSeek-V3.2's settings. Raises BridgeError if layers share the selection of one indexer."""
    if "shared" in config.indexer_types:
        reason = "every layer needs its own indexer"
        raise refuse(config.model_type, "indexer_types", "shared", reason)
    return deepseek_v32.megatron_config(config, interleaved=True)


FAMILY = Family(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    read_shape=deepseek_v32.model_shape,
    read_megatron=megatron_config,
    layer=deepseek_v32.FAMILY.layer,
    dense=deepseek_v32.FAMILY.dense,
    moe=deepseek_v32.FAMILY.moe,
)
