"""What the ladder may use of this machine: packages that are installed and that ``SKYRL_WITHOUT`` does not name."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

NEEDS = {"te": "transformer_engine", "vllm": "vllm", "ray": "ray", "fla": "fla"}
"""Short names of ``--without`` and ``SKYRL_WITHOUT`` → the package that is imported."""


@functools.cache
def missing() -> frozenset[str]:
    """Return the short names of packages that are not installed or are to be left out. Imports none of them."""
    without = {name.strip() for name in os.environ.get("SKYRL_WITHOUT", "").split(",")} - {""}
    if unknown := without - NEEDS.keys():
        raise ValueError(f"SKYRL_WITHOUT={os.environ['SKYRL_WITHOUT']}: {sorted(unknown)} are none of {sorted(NEEDS)}")
    return frozenset(name for name, package in NEEDS.items() if name in without or find_spec(package) is None)


def layer_choices() -> list[str]:
    """Return the values of Megatron's ``transformer_impl`` that can be tried here."""
    return ["local"] if "te" in missing() else ["local", "transformer_engine"]
