"""Facts of a Hugging Face ``config.json``, told without transformers: sizes for layouts, KV bytes, rotary parameters.

The exact tensors of a model are the business of ``bridges/``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridges import json_file
from bridges.errors import BridgeError
from skyrl_megatron.config.rules.layout import ModelDimensions
from skyrl_megatron.errors import ConfigError, Problem

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_hf_config(path: str, key: str = "trainer.policy.model.path", download: bool = False) -> dict[str, Any] | None:
    """Return ``config.json`` of a folder, or of a hub model in the local cache (``download``: or fetched).

    None for a hub model that is not at hand. Raises ConfigError naming ``key`` when a local folder is missing or its
    file is broken.
    """
    local = Path(path).expanduser()
    try:
        if local.exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
            if not (local / json_file.CONFIG).is_file():
                why = "the folder has no config.json" if local.is_dir() else "no such folder"
                raise BridgeError(f"{why}: name a Hugging Face model folder or a hub model")
            return json_file.read_hf_config(local)
        if cached := _cached_from_hub(path):
            return json_file.read_json(cached)
        text = _fetch_from_hub(path) if download else None
        return None if text is None else json_file.parse_json(text, f"config.json of {path}")
    except BridgeError as error:
        raise ConfigError([Problem(key, path, str(error))]) from None


def _cached_from_hub(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str | os.PathLike) else None


@functools.cache
def _fetch_from_hub(name: str) -> str | None:
    """Return the text of a hub model's ``config.json``: one request, no retries; None where it cannot be had."""
    import httpx
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        url = hf_hub_url(name, "config.json")
        token = get_token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(url, headers=headers, follow_redirects=True, timeout=10)
    except (httpx.HTTPError, HFValidationError):
        return None
    return answer.text if answer.status_code == 200 else None


def model_dimensions(hf: Mapping[str, Any]) -> ModelDimensions | None:
    """Return the sizes that a layout must divide; None where the file does not name them."""
    layers, heads = hf.get("num_hidden_layers"), hf.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return None
    experts = _first(hf, "num_experts", "num_local_experts", "n_routed_experts")
    expert_size = _first(hf, "moe_intermediate_size", "intermediate_size") if experts else 0
    shared = _first(hf, "shared_expert_intermediate_size") or _first(hf, "n_shared_experts") * expert_size
    latent = (_first(hf, "kv_lora_rank") + _first(hf, "qk_rope_head_dim"), _first(hf, "q_lora_rank"))
    return ModelDimensions(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=_first(hf, "num_key_value_heads") or heads,
        ffn_hidden_size=_first(hf, "intermediate_size") if _has_dense_layers(hf, experts) else 0,
        num_experts=experts,
        moe_ffn_hidden_size=expert_size,
        shared_expert_size=shared if experts else 0,
        latent_rows=tuple(rows for rows in latent if rows) if hf.get("kv_lora_rank") else (),
    )


def kv_bytes_per_token(hf: Mapping[str, Any], dtype: str, *, tp: int = 1, pp: int = 1) -> int:
    """Return the bytes of KV cache that one token takes on each rank of an engine. ``dtype``: of the engine's weights.

    Key-value heads are spread over tp, at least one on each rank; multi-latent attention keeps one latent per token.
    """
    if hf.get("kv_lora_rank"):
        width = hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
    else:
        heads = hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
        width = 2 * max(1, (hf.get("num_key_value_heads") or heads) // tp) * head_dim
    return int(-(-hf["num_hidden_layers"] // pp) * width * element_bytes(dtype, hf))


def element_bytes(dtype: str, hf: Mapping[str, Any]) -> int:
    """Return the bytes of one number of type ``dtype``; ``auto`` is the model's own type, else bfloat16."""
    return _BYTES.get(dtype) or _BYTES.get(str(hf.get("dtype") or hf.get("torch_dtype")), 2)


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, in the one place or the two where transformers has kept them."""
    if hf.get("rope_parameters"):
        return dict(hf["rope_parameters"])
    scaling = dict(hf.get("rope_scaling") or {"rope_type": "default"})
    return {**scaling, "rope_theta": hf.get("rope_theta", 10000.0)}


def _first(hf: Mapping[str, Any], *keys: str) -> int:
    """Return the first of several keys that holds a number, else 0."""
    return next((hf[key] for key in keys if isinstance(hf.get(key), int)), 0)


def _has_dense_layers(hf: Mapping[str, Any], experts: int) -> bool:
    """Return whether any layer has a feed-forward block without experts."""
    sparse_step, dense_layers = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers")
    return not experts or bool(_first(hf, "first_k_dense_replace")) or sparse_step > 1 or bool(dense_layers)
