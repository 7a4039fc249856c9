"""Keys that somebody may have meant who wrote an unknown one."""

from __future__ import annotations

import difflib

from skyrl_megatron.config.fields import field_types, leaves


def nearest_keys(root: type, cls: type, key: str, whole: str) -> list[str]:
    """Return up to three valid keys like ``whole``, wrong from ``key`` on: siblings, the same last name, any."""
    prefix, _, name = key.rpartition(".")
    every = [leaf for leaf, _, _ in leaves(root)]
    siblings = [f"{prefix}.{near}" if prefix else near for near in difflib.get_close_matches(name, field_types(cls))]
    same = [leaf for leaf in every if leaf.rpartition(".")[2] == name]
    alike = difflib.get_close_matches(whole, every, n=3, cutoff=0.85)
    return list(dict.fromkeys([*alike[:1], *siblings, *same, *alike]))[:3]
