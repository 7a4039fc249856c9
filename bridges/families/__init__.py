"""The supported model families, one file each, and the registration of custom families."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from bridges.errors import BridgeError, UnknownFamilyError
from bridges.family import Family
from bridges.files import holds_text_model, text_config

# One module of this folder per HF model_type.
SUPPORTED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "dots1",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hy_v3",
    "qwen3_next",
    "qwen3_5_moe_text",
    "mimo_v2_flash",
    "deepseek_v32",
    "glm_moe_dsa",
    "solar_open",
)


GROUP = "bridges.families"
"""Group of entry points by which packages provide custom :class:`Family` objects."""
_families: dict[str, Family] = {}  # model_type or alias → family


def register(family: Family) -> Family:
    """Register a family in this process. Registering the same family again has no effect.

    Raises :class:`BridgeError` if its ``model_type`` or an alias belongs to another family.
    """
    _load_built_in()
    return _add(family)


def supported() -> tuple[str, ...]:
    """Return the ``model_type`` of each family, without aliases: built-in families first, then registered ones."""
    _load_installed()
    return tuple(dict.fromkeys(family.model_type for family in _families.values()))


def _add(family: Family) -> Family:
    for name in (family.model_type, *family.aliases):
        if _families.setdefault(name, family) is not family:
            owner = _families[name].model_type
            raise BridgeError(f"model_type={name!r} belongs to the family {owner} already: register another name")
    return family


@cache
def _load_built_in() -> None:
    for name in SUPPORTED:
        _add(import_module(f"bridges.families.{name}").FAMILY)


@cache
def _load_installed() -> None:
    _load_built_in()
    for point in entry_points(group=GROUP):
        try:
            _add(point.load())
        except Exception as error:
            entry = f"entry point {GROUP}.{point.name}={point.value}"
            raise BridgeError(f"{entry} cannot be loaded: {error}; fix or remove its package") from error


def get_family(model_type: str) -> Family:
    """Return the family of a HF ``model_type`` or alias. Raises :class:`UnknownFamilyError` with the nearest name."""
    _load_installed()
    if model_type in _families:
        return _families[model_type]
    near = difflib.get_close_matches(str(model_type), _families, n=1, cutoff=0.5)
    nearest = f"; nearest: {near[0]}" if near else ""
    supported = ", ".join(sorted(_families))
    raise UnknownFamilyError(
        f"model_type={model_type!r} is not supported{nearest}. Supported: {supported}. Run python -m bridges inspect "
        "FOLDER to compare with the nearest table and with Megatron-Bridge"
    )


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of the language model that ``config.json`` describes.

    Raises :class:`UnknownFamilyError`, also for a model of text and images whose folder is not read.
    """
    model_type = str(text_config(hf_config).get("model_type"))
    if not holds_text_model(hf_config):
        return get_family(model_type)
    _load_installed()
    whole_type, family = str(hf_config.get("model_type")), _families.get(model_type)
    if whole_type in _families:  # a family of the whole, which reads its parts itself
        return _families[whole_type]
    if family is None or whole_type not in family.within:
        read = sorted(name for one in _families.values() for name in one.within)
        fix = f"use a folder of {model_type}" if family else f"use a text model ({', '.join(sorted(_families))})"
        raise UnknownFamilyError(
            f"model_type={whole_type!r} is a model of text and images around a {model_type}. The folders of such "
            f"models are read for {', '.join(dict.fromkeys(read))}: {fix}"
        )
    return family
