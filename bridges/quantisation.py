"""What ``quantization_config`` of a ``config.json`` says: which weights are quantised how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridges.errors import BridgeError

METHODS = ("fp8", "mxfp8", "compressed-tensors", "mxfp4")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a model is quantised."""

    method: str
    blocks: tuple[tuple[int, int], ...]
    """Rows and columns that share a scale, of each group of weights of 8 bits; 0: all of a matrix."""
    left_out: tuple[str, ...]
    """Modules that are not quantised: names, parts of them, or ``re:`` and a regular expression."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Quantisation | None:
        """Read a ``config.json``; None where nothing is quantised. Raises :class:`BridgeError`, which begins with
        ``where``, for a way that cannot be undone exactly."""
        found = config.get("quantization_config")
        if not found:
            return None
        method = method_of(found)
        if method not in METHODS:
            raise unfit(where, f"quant_method={method!r:.80}")
        try:
            return cls._of(found, str(method), where)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
            raise unfit(where, f"quantization_config={found!r:.200} ({error!s:.80})") from error

    @classmethod
    def _of(cls, found: Mapping[str, Any], method: str, where: str) -> Quantisation:
        blocks: tuple[tuple[int, int], ...] = ()
        if method == "fp8":
            rows, columns = found.get("weight_block_size") or (128, 128)
            blocks = ((int(rows), int(columns)),)
        elif method == "mxfp8":
            blocks = ((1, 32),)
        elif method == "compressed-tensors":
            blocks = tuple(_block(group.get("weights") or {}, where) for group in found["config_groups"].values())
        return cls(method, blocks, _left_out(found))

    def block(self, weight: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the rows and columns of a block of a matrix, going by ``config.json`` alone; None for one that is not
        quantised in 8 bits."""
        module = weight.removesuffix(".weight")
        if not self.blocks or len(shape) != 2 or any(_names(pattern, module) for pattern in self.left_out):
            return None
        rows, columns = self.blocks[0]
        return rows or shape[0], columns or shape[1]


def method_of(found: Mapping[str, Any]) -> Any:
    """Return ``quant_method`` of a ``quantization_config``, None where it has none; MXFP8 has the same name whoever
    wrote it."""
    if not isinstance(found, Mapping):
        return None
    method = found.get("quant_method")
    return "mxfp8" if method == "modelopt" and str(found.get("quant_algo")).upper() == "MXFP8" else method


def _left_out(found: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("modules_to_not_convert", "ignore", "ignored_layers")
    names = next((tuple(found[key]) for key in keys if found.get(key)), ())
    for name in names:
        if name.startswith("re:"):
            if len(name) > 200 or _SLOW.search(name) or len(_REPEATS.findall(name)) > 4:
                raise ValueError(f"{name:.60} takes too long to compare with names")
            re.compile(name[3:])
    return names


_SLOW, _REPEATS = re.compile(r"\)[*+{?]"), re.compile(r"[*+{]")
"""What makes a regular expression slow: a group that is repeated, and repetitions one after the other."""


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return the block of a group of compressed-tensors (``quantization/quant_args.py`` there)."""
    sizes: Mapping[str, Any] = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }
    size = sizes.get(weights.get("strategy", "tensor"))
    eight = weights.get("num_bits") == 8 and weights.get("type", "int") in ("int", "float")
    if not eight or not weights.get("symmetric", True) or weights.get("actorder") or size is None:
        kept = ("num_bits", "type", "strategy", "symmetric", "actorder")
        raise unfit(where, f"quantised weights { ({key: weights.get(key) for key in kept}) }")
    return int(size[0]), int(size[1])


def unfit(where: str, what: str) -> BridgeError:
    """Return the error for a folder whose weights cannot be made of what is on disk."""
    return BridgeError(
        f"{where}: {what} cannot be dequantised exactly; use the bf16 release of the model, or one in fp8, mxfp8, 8 "
        "bits of compressed-tensors (symmetric), or in mxfp4"
    )
