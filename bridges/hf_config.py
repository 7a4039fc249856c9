"""Reading HF configs: every value as transformers itself reads it, then in Megatron's words.

The functions here translate settings that several families share; a setting Megatron cannot express is refused with
its key. Sources: ``transformers/modeling_rope_utils.py``, ``megatron/core/models/gpt/gpt_model.py``,
``megatron/core/transformer/transformer_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bridges.errors import BridgeError
from bridges.rules import ModelShape

# Meta's Llama 3 scaling is written into Megatron with these values; only the factor is an argument there.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(hf_config: Mapping[str, Any], model_type: str) -> PreTrainedConfig:
    """``config.json`` (a dict) as the config object of ``model_type``, defaults filled in.

    ``auto_map`` (remote code) is dropped: the families here compute with Megatron, never with downloaded code.
    """
    values = {k: v for k, v in hf_config.items() if k not in {"auto_map", "model_type", "quantization_config"}}
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # transformers raises many types for a bad value; all mean the same to the caller
        raise BridgeError(f"config.json of a {model_type} model: {error}") from error
    return config


def refuse(model_type: str, key: str, value: object, reason: str) -> BridgeError:
    """The error for an option that cannot be converted exactly."""
    return BridgeError(f"{model_type}: {key}={value!r} in config.json is not supported: {reason}")


def require(config: PreTrainedConfig, key: str, allowed: tuple[object, ...], reason: str) -> None:
    """Raises :class:`BridgeError` unless ``config.key`` is one of ``allowed``; absent keys pass."""
    value = getattr(config, key, allowed[0])
    if value not in allowed:
        raise refuse(config.model_type, key, value, reason)


def head_dim(config: PreTrainedConfig) -> int:
    """Size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_dims(config: PreTrainedConfig) -> dict[str, int]:
    """``V H A G D Q K`` of the legend in :mod:`bridges.rules`. Raises if the KV groups do not divide the heads."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = head_dim(config)
    if heads % groups:
        raise refuse(config.model_type, "num_key_value_heads", groups, f"it does not divide {heads} attention heads")
    return {
        "V": config.vocab_size,
        "H": config.hidden_size,
        "A": heads,
        "G": groups,
        "D": size,
        "Q": heads * size,
        "K": groups * size,
    }


def dense_shape(config: PreTrainedConfig, *flags: str) -> ModelShape:
    """Shape of a model without experts."""
    dims = attention_dims(config) | {"F": config.intermediate_size}
    return ModelShape(dims, (False,) * config.num_hidden_layers, frozenset(flags) | tie_flag(config))


def moe_shape(
    config: PreTrainedConfig, *flags: str, experts: int, size: int, moe: tuple[bool, ...], **dims: int
) -> ModelShape:
    """Shape of a model with ``experts`` of feed-forward size ``size`` in the layers marked by ``moe``."""
    sizes = attention_dims(config) | {"F": config.intermediate_size, "E": experts, "M": size} | dims
    return ModelShape(sizes, moe, frozenset(flags) | tie_flag(config))


def sparse_steps(config: PreTrainedConfig) -> tuple[bool, ...]:
    """For each layer of a Qwen MoE, whether it holds experts (``decoder_sparse_step``, ``mlp_only_layers``)."""
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers))


def tie_flag(config: PreTrainedConfig) -> frozenset[str]:
    """``untied`` if the output layer has weights of its own."""
    return frozenset() if config.tie_word_embeddings else frozenset({"untied"})


def rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, into which older spellings were already folded."""
    return dict(config.rope_parameters or {})


def base_transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that every family sets."""
    require(config, "hidden_act", ("silu",), "Megatron's gated layers are built for silu here")
    require(config, "attention_dropout", (0, 0.0), "the trainer runs without dropout")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "rotary_interleaved": False,
    }


def attention_fields(config: PreTrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, Any]:
    """Fields of grouped-query attention, sliding window included."""
    dims = attention_dims(config)
    return {
        "num_query_groups": dims["G"],
        "kv_channels": dims["D"],
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        **window_fields(config),
    }


def window_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """``window_size``: HF's window of W tokens includes the query's own, Megatron's counts those before it.

    Layers without a window are listed in ``window_attn_skip_freq`` (1 = windowed).
    """
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return {}
    kinds = getattr(config, "layer_types", None)
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * config.num_hidden_layers
    if not any(windowed):
        return {}
    fields: dict[str, Any] = {"window_size": (window - 1, 0)}
    if not all(windowed):
        fields["window_attn_skip_freq"] = [int(flag) for flag in windowed]
    return fields


def model_arguments(config: PreTrainedConfig, **rotary: Any) -> dict[str, Any]:
    """Keyword arguments of ``GPTModel``."""
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        **rotary,
    }


def rotary_arguments(config: PreTrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary embedding outside MLA: (keyword arguments of ``GPTModel``, attributes of the config object)."""
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
    """What ``GPTModel`` reads from the config object for ``position_embedding_type="yarn"``."""
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


def expert_fields(config: PreTrainedConfig, *, experts: int, size: int, moe: tuple[bool, ...]) -> dict[str, Any]:
    """Fields of a model with experts. A list for ``moe_layer_freq`` only where layers differ (1 = experts)."""
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_layer_freq": 1 if all(moe) else [int(flag) for flag in moe],
    }
