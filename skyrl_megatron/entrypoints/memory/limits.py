"""How much memory there is, as ``--gpu`` and ``--host-memory`` say it."""

from __future__ import annotations

import re

from skyrl_megatron.errors import ConfigError, Problem

GPUS = {"a100": 81920, "h20": 97871, "h100": 81559, "h200": 143771, "b200": 183359, "b300": 275040}
"""MiB of the parts that ``--gpu`` knows by name, as nvidia-smi reports them."""

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def read_size(option: str, text: str) -> int:
    """Return the bytes that ``text`` names: ``80GB``, ``80GiB``, ``85899345920``, or for ``--gpu`` a GPU.

    Raises ConfigError for anything else, and for less than a GiB.
    """
    known = GPUS if option == "--gpu" else {}
    word = text.strip().lower()
    if word in known:
        return known[word] << 20
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", word)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1 << 30:
        names = f"one of {', '.join(known)}, or " if known else ""
        raise ConfigError([Problem(option, text, f"write {names}a size of at least 1 GiB, such as 80GB or 80GiB")])
    return size
