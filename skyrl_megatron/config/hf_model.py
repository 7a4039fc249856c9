"""The Hugging Face models that a configuration names: their repositories, their folders on this node, and what their
``config.json`` says of sizes, KV-cache bytes and rotary parameters, without transformers.

A process that opens a model calls :func:`model_folder` on its node. ``bridges/`` describes the exact tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges import files as json_file
from bridges.errors import BridgeError
from skyrl_megatron import hub
from skyrl_megatron.config.layout import ModelDimensions
from skyrl_megatron.errors import ConfigError, HubError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

ADAPTER = "adapter"
"""Used as a role: the initial adapter of the policy."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of ``config.json`` that hold the number of experts of a layer, by family."""
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k")
ENGINE_KWARGS = "generator.inference_engine.engine_init_kwargs"
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_repo(cfg: SkyRLTrainConfig, role: str) -> hub.Repo | None:
    """Return the hub repository of a role's model; None for a local folder."""
    _, path, revision = _named(cfg, role)
    repo = hub.Repo("model", path, revision, role == ADAPTER)
    return repo if repo.key in cfg.trainer.hub_commits or hub.is_hub_name(repo.name) else None


def _named(cfg: SkyRLTrainConfig, role: str) -> tuple[str, str, str | None]:
    """Return (configuration key, name or folder, revision) of a role's model. Named teachers are ``teacher/NAME``."""
    if role.startswith("teacher/"):
        return "trainer.teacher.models", cfg.trainer.teacher.models[role.removeprefix("teacher/")], None
    if role != ADAPTER:
        model = getattr(cfg.trainer, role).model
        return f"trainer.{role}.model.path", model.path or "", model.revision
    path = cfg.trainer.policy.model.lora.adapter_path or ""
    name, _, revision = path.partition("@")
    return "trainer.policy.model.lora.adapter_path", *(
        (path, None) if os.path.exists(path) else (name, revision or None)
    )


def adapter_folder(cfg: SkyRLTrainConfig) -> Path | None:
    """Return the folder of the initial adapter, see :func:`model_folder`; None if training starts with a new one."""
    return model_folder(cfg, ADAPTER) if cfg.trainer.policy.model.lora.adapter_path else None


def model_folder(
    cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True, say: hub.Say = hub.quiet
) -> Path:
    """Return the folder of a role's model on this node. Without ``weights``: configuration and tokenizer only.

    Downloads a hub model that is not in the cache of this node; ``say`` gets the progress. Raises ConfigError with the
    key ``trainer.ROLE.model.path`` and the fix.
    """
    repo = model_repo(cfg, role)
    if repo is None:
        return Path(_named(cfg, role)[1]).expanduser()
    try:
        commit = cfg.trainer.hub_commits.get(repo.key) or hub.resolve(repo)
        return hub.fetch(
            repo, commit, hub.WHOLE if weights else hub.SMALL, say=say, stall_s=cfg.trainer.phase_timeout_s
        )
    except HubError as error:
        raise ConfigError([Problem(_named(cfg, role)[0], repo.name, str(error))]) from error


def cached_folder(cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True) -> Path | None:
    """Return the result of :func:`model_folder`, or None if the model is not in the cache."""
    repo = model_repo(cfg, role)
    if repo is None:
        return model_folder(cfg, role)
    commit = cfg.trainer.hub_commits.get(repo.key) or hub.cached_commit(repo)
    return hub.cached(repo, commit, hub.WHOLE if weights else hub.SMALL) if commit else None


def hub_models(cfg: SkyRLTrainConfig, roles: Sequence[str]) -> Iterator[hub.HubReference]:
    """Yield the hub models of ``roles``, and the initial adapter of the policy."""
    for role in (*roles, ADAPTER):
        if repo := model_repo(cfg, role):
            yield hub.HubReference(_named(cfg, role)[0], repo.name, repo)


def read_hf_config(cfg: SkyRLTrainConfig, role: str = "policy") -> dict[str, Any] | None:
    """Return ``config.json`` of a role's language model, from its folder or the cache of the Hugging Face hub.

    None if a hub model is not in the cache. Raises ConfigError, naming the key, if a folder is missing or its file is
    invalid.
    """
    path = str(getattr(cfg.trainer, role).model.path)
    folder = cached_folder(cfg, role, weights=False)
    if folder is None:
        return None
    try:
        if not (folder / json_file.CONFIG).is_file():
            missing = f"no such folder: {folder}{hub.similar_folder(path)}"
            why = "the folder has no config.json" if folder.is_dir() else missing
            raise BridgeError(f"{why}; give the folder of a Hugging Face model, or ORG/NAME of a model on the hub")
        return json_file.text_config(json_file.read_hf_config(folder))
    except BridgeError as error:
        raise ConfigError([Problem(f"trainer.{role}.model.path", path, str(error))]) from None
    except OSError as error:  # an invalid file name, or a folder without read permission
        why = f"cannot be read ({error.strerror}); give the folder of a Hugging Face model"
        raise ConfigError([Problem(f"trainer.{role}.model.path", path, why)]) from None


def engines_quantise(cfg: SkyRLTrainConfig, hf: Mapping[str, Any]) -> bool:
    """Return whether engines hold weights in the quantised form of the policy's folder. ``hf``: its ``config.json``.

    They do not if ``hf_overrides`` removes ``quantization_config``.
    """
    overrides = cfg.generator.inference_engine.engine_init_kwargs.get("hf_overrides")
    changed = overrides if isinstance(overrides, Mapping) else {}
    return bool({**hf, **changed}.get("quantization_config"))


def model_dimensions(hf: Mapping[str, Any]) -> ModelDimensions | None:
    """Return the sizes that a layout must divide; None if the file does not contain them."""
    layers, heads = hf.get("num_hidden_layers"), hf.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return None
    experts = _first(hf, *EXPERT_COUNTS)
    expert_size = _first(hf, "moe_intermediate_size", "intermediate_size") if experts else 0
    shared = _first(hf, "shared_expert_intermediate_size") or _first(hf, *_SHARED_COUNTS) * expert_size
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
        delta_net_heads=_first(hf, "linear_num_key_heads"),
    )


def experts_per_token(hf: Mapping[str, Any]) -> int:
    """Return the number of routed experts per token; 0 for a dense model. ``hf``: with transformers' defaults."""
    return _first(hf, *_EXPERTS_PER_TOKEN)


def kv_bytes_per_token(hf: Mapping[str, Any], dtype: str, *, tp: int = 1, pp: int = 1) -> int:
    """Return the bytes of KV cache per token on each rank of an engine. ``dtype``: that of the engine's weights.

    Key-value heads are split over tp, at least one per rank. Multi-latent attention stores one latent per token.
    """
    if hf.get("kv_lora_rank"):
        width = hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
    else:
        heads = hf["num_attention_heads"]
        head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
        width = 2 * max(1, (hf.get("num_key_value_heads") or heads) // tp) * head_dim
    return int(-(-hf["num_hidden_layers"] // pp) * width * element_bytes(dtype, hf))


def element_bytes(dtype: str, hf: Mapping[str, Any]) -> int:
    """Return the bytes of one element of ``dtype``; ``auto`` is the model's dtype, else bfloat16."""
    return _BYTES.get(dtype) or _BYTES.get(str(hf.get("dtype") or hf.get("torch_dtype")), 2)


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters, from ``rope_parameters`` or from the two keys of older transformers versions."""
    if hf.get("rope_parameters"):
        return dict(hf["rope_parameters"])
    scaling = dict(hf.get("rope_scaling") or {"rope_type": "default"})
    return {**scaling, "rope_theta": hf.get("rope_theta", 10000.0)}


def _first(hf: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first of ``keys`` that holds an integer, else 0."""
    return next((hf[key] for key in keys if isinstance(hf.get(key), int)), 0)


def _has_dense_layers(hf: Mapping[str, Any], experts: int) -> bool:
    """Return whether any layer has a dense feed-forward block."""
    if not experts:
        return True
    if kinds := hf.get("mlp_layer_types"):
        return "dense" in kinds
    steps = max(_first(hf, "decoder_sparse_step"), _first(hf, "moe_layer_interval"))
    first = _first(hf, "first_k_dense_replace", "moe_layer_start_index")
    return bool(first) or steps > 1 or bool(hf.get("mlp_only_layers"))
