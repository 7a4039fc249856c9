"""Rotary embeddings in Megatron's words: plain, linear, Llama 3 and YaRN scaling, inside and outside MLA.

Sources: ``transformers/modeling_rope_utils.py``, ``megatron/core/models/common/embeddings``,
``megatron/core/transformer/multi_latent_attention.py``.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from bridges.hf_config import refuse

# Meta's Llama 3 scaling is written into Megatron with these values; only the factor is an argument there.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5, into which older spellings were already folded."""
    return dict(config.rope_parameters or {})


def rotary_arguments(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rotary embedding outside MLA: (keyword arguments of ``GPTModel``, attributes of the config object)."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if kind == "default":
        return arguments, {}
    if kind == "linear":
        return arguments | {"seq_len_interpolation_factor": rope["factor"]}, {}
    if kind == "llama3":
        for key, fixed in LLAMA3_FIXED.items():
            if rope.get(key, fixed) != fixed:
                raise refuse(config.model_type, f"rope_parameters.{key}", rope[key], f"Megatron fixes it to {fixed}")
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}, {}
    if kind == "yarn":
        return arguments | {"position_embedding_type": "yarn"}, yarn_attributes(config, rope)
    raise refuse(config.model_type, "rope_parameters.rope_type", kind, "use default, linear, llama3 or yarn")


def yarn_attributes(config: PreTrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Return what ``GPTModel`` reads from the config object for ``position_embedding_type="yarn"``."""
    if rope.get("attention_factor") is not None:
        value = rope["attention_factor"]
        raise refuse(config.model_type, "rope_parameters.attention_factor", value, "Megatron derives it from factor")
    both = bool(rope.get("mscale") and rope.get("mscale_all_dim"))
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.get("beta_fast") or 32,
        "yarn_beta_slow": rope.get("beta_slow") or 1,
        "yarn_mscale": rope["mscale"] if both else None,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if both else None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def mla_rotary(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary fields of ``MLATransformerConfig``, whose own default is YaRN with factor 40."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": rope["rope_theta"]}
    if kind == "default":
        # The softmax scale reads these two even without YaRN.
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise refuse(
            config.model_type, "rope_parameters.rope_type", kind, "multi-latent attention takes default or yarn"
        )
    for key, fixed in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, fixed) != fixed:
            raise refuse(config.model_type, f"rope_parameters.{key}", rope[key], f"Megatron's MLA fixes it to {fixed}")
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not scale:
        raise refuse(config.model_type, "rope_parameters.mscale_all_dim", all_dim, "it needs mscale as well")
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": scale if all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }
