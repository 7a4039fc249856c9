"""The supported model families, one file each: a config mapping and rows of data."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module

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


def supported() -> tuple[str, ...]:
    """The ``model_type`` values with a table of their own, in the order of ``SUPPORTED``."""
    return SUPPORTED


@cache
def _by_type() -> dict[str, Family]:
    families = [import_module(f"bridges.families.{name}").FAMILY for name in SUPPORTED]
    return {name: family for family in families for name in (family.model_type, *family.aliases)}


def get_family(model_type: str) -> Family:
    """The family of a HF ``model_type`` (aliases included). Raises :class:`BridgeError` with the nearest name."""
    families = _by_type()
    if model_type in families:
        return families[model_type]
    near = difflib.get_close_matches(str(model_type), families, n=1, cutoff=0.5)
    nearest = f"; nearest: {near[0]}" if near else ""
    raise BridgeError(f"model_type={model_type!r} is not supported{nearest}. Supported: {', '.join(sorted(families))}")
