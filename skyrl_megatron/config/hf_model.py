"""What a Hugging Face ``config.json`` says about sizes, without transformers: enough to judge layouts and lengths.

The exact tensors of a model are the business of ``bridges/``; here are only the numbers that a layout must divide.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.config.rules.layout import ModelShape
from skyrl_megatron.errors import ConfigError, Problem


def read_hf_config(path: str, key: str = "trainer.policy.model.path", download: bool = False) -> dict[str, Any] | None:
    """``config.json`` of a folder, or of a hub model that is in the local cache (``download``: or can be fetched).

    None for a hub model that is not at hand. Raises ConfigError naming ``key`` when a local folder is missing or its
    file is broken.
    """
    local = Path(path).expanduser()
    if local.exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        file: Path | None = local / "config.json"
        if not (local / "config.json").is_file():
            fix = "the folder has no config.json" if local.is_dir() else "no such folder"
            raise ConfigError([Problem(key, path, f"{fix}: name a Hugging Face model folder or a hub model")])
    else:
        file = _cached_from_hub(path)
    where = file or f"config.json of {path}"
    try:
        text = file.read_text() if file else _fetch_from_hub(path) if download else None
        content = None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        fix = f"{where}, line {error.lineno}: {error.msg}; fetch the file again"
        raise ConfigError([Problem(key, path, fix)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(key, path, f"{where} cannot be read: {error}")]) from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError([Problem(key, path, f"{where} holds no mapping; fetch the file again")])
    return content


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
    """The text of a hub model's ``config.json``: one request, no retries; None where it cannot be had."""
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


def model_shape(hf: Mapping[str, Any]) -> ModelShape | None:
    """The sizes that a layout must divide; None where the file does not name them."""
    layers, heads = hf.get("num_hidden_layers"), hf.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return None
    experts = _first(hf, "num_experts", "num_local_experts", "n_routed_experts")
    expert_size = _first(hf, "moe_intermediate_size", "intermediate_size") if experts else 0
    shared = _first(hf, "shared_expert_intermediate_size") or _first(hf, "n_shared_experts") * expert_size
    latent = (_first(hf, "kv_lora_rank") + _first(hf, "qk_rope_head_dim"), _first(hf, "q_lora_rank"))
    return ModelShape(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=_first(hf, "num_key_value_heads") or heads,
        ffn_hidden_size=_first(hf, "intermediate_size") if _has_dense_layers(hf, experts) else 0,
        num_experts=experts,
        moe_ffn_hidden_size=expert_size,
        shared_expert_size=shared if experts else 0,
        latent_rows=tuple(rows for rows in latent if rows) if hf.get("kv_lora_rank") else (),
    )


def _first(hf: Mapping[str, Any], *keys: str) -> int:
    """The first of several keys that holds a number, else 0."""
    return next((hf[key] for key in keys if isinstance(hf.get(key), int)), 0)


def _has_dense_layers(hf: Mapping[str, Any], experts: int) -> bool:
    """Whether any layer has a feed-forward block without experts."""
    sparse_step, dense_layers = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers")
    return not experts or bool(_first(hf, "first_k_dense_replace")) or sparse_step > 1 or bool(dense_layers)
