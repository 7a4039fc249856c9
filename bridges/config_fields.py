"""Types of the fields of ``config.json``, whoever reads them. Imports neither torch nor transformers.

A field that is absent or null has the default of its family; one of another type is refused with file and key, instead
of wherever the first sum with it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bridges.errors import BridgeError

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "decoder_sparse_step", "moe_layer_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings", "n_group",
)  # fmt: skip
_COUNTS = (
    "shared_expert_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts",
    "moe_num_shared_experts", "num_experts_per_tok", "moe_k", "num_nextn_predict_layers", "num_mtp_modules",
    "first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index", "kv_lora_rank", "q_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "topk_group", "index_head_dim", "index_n_heads",
    "index_topk",
)  # fmt: skip
_BY_LAYER = ("intermediate_size", "moe_intermediate_size", "moe_num_experts")
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor")
_OBJECTS = ("quantization_config", "rope_scaling", "rope_parameters", "auto_map")
_LISTS = ("mlp_only_layers", "layer_types", "mlp_layer_types", "architectures")
_MOST = 2**40  # of a size: what a damaged number is beyond


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < _MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and -1 <= value < _MOST


def _is_count_or_counts(value: Any) -> bool:
    """Of a model of no known family, which may have another count in each layer."""
    return _is_count(value) or (isinstance(value, list) and all(map(_is_count, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, int | str) for each in value)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (_is_size, "a whole number from 1 on")),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number")),
    **dict.fromkeys(_BY_LAYER, (_is_count_or_counts, "a whole number")),
    **dict.fromkeys(_NUMBERS, (_is_number, "a number")),
    **dict.fromkeys(_OBJECTS, (lambda value: isinstance(value, Mapping), "a JSON object")),
    **dict.fromkeys(_LISTS, (_is_list, "a list of names or numbers")),
    "model_type": (lambda value: isinstance(value, str), "a name"),
}


def check_fields(config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`BridgeError`, naming ``where`` the configuration is from, the key and its value, for a field of
    another type than its."""
    for key, (fits, wanted) in _FIELDS.items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise BridgeError(f"{where}: {key}={value!r:.80} must be {wanted}; fetch the file again")
