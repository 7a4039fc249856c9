"""The supported model families, one file each: a config mapping and rows of data. Users' own are registered here."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from bridges.errors import BridgeError
from bridges.family import Family

# The visible list: one module of this folder per HF model_type.
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
)


GROUP = "bridges.families"
"""Entry points that name a :class:`Family`, in packages that bring families of their own."""
_registered: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family in this process. The same one again changes nothing.

    Raises :class:`BridgeError` when its ``model_type`` or an alias belongs to another family.
    """
    for name in (family.model_type, *family.aliases):
        known = _by_type().get(name)
        if known is not None and known is not family:
            raise BridgeError(f"model_type={name!r} belongs to the family {known.model_type}: register another name")
    _registered[family.model_type] = family
    return family


def supported() -> tuple[str, ...]:
    """List the ``model_type`` values with a table of their own: built-in ones first, then registered ones."""
    return tuple(dict.fromkeys(family.model_type for family in _by_type().values()))


@cache
def _installed() -> tuple[Family, ...]:
    built_in = [import_module(f"bridges.families.{name}").FAMILY for name in SUPPORTED]
    return (*built_in, *(point.load() for point in entry_points(group=GROUP)))


def _by_type() -> dict[str, Family]:
    families = [*_installed(), *_registered.values()]
    return {name: family for family in families for name in (family.model_type, *family.aliases)}


def get_family(model_type: str) -> Family:
    """Return the family of a HF ``model_type`` or alias. Raises :class:`BridgeError` with the nearest name."""
    families = _by_type()
    if model_type in families:
        return families[model_type]
    near = difflib.get_close_matches(str(model_type), families, n=1, cutoff=0.5)
    nearest = f"; nearest: {near[0]}" if near else ""
    raise BridgeError(f"model_type={model_type!r} is not supported{nearest}. Supported: {', '.join(sorted(families))}")
