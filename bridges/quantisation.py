"""Parse ``quantization_config``: which weights are quantised and how, and the form in which engines keep them.

======== ============================================== ===========================================================
method   ``quantization_config``                        on disk
======== ============================================== ===========================================================
fp8      ``quant_method: fp8``, ``weight_block_size``   ``W`` float8 E4M3, ``W_scale_inv`` fp32 of each block
mxfp8    ``quant_method: mxfp8``, or ``modelopt`` with  ``W`` float8 E4M3, ``W_scale`` uint8 of 32 columns of a row:
         ``quant_algo: MXFP8``                          2^(scale − 127)
======== ============================================== ===========================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridges.errors import BridgeError

METHODS = ("fp8", "mxfp8", "compressed-tensors", "mxfp4")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a model on disk."""

    method: str
    blocks: tuple[tuple[int, int], ...]
    """Rows and columns that share a scale, for each group of 8-bit weights; 0: the whole matrix."""
    left_out: tuple[str, ...]
    """Modules that are not quantised: names, parts of names, or ``re:`` and a regular expression."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Quantisation | None:
        """Parse a ``config.json``; None if the model is not quantised.

        Raises :class:`BridgeError`, with ``where`` as prefix, for a format that cannot be dequantised exactly.
        """
        section = config.get("quantization_config")
        if not section:
            return None
        method = method_of(section)
        if method not in METHODS:
            raise not_dequantizable(where, f"quant_method={method!r:.80}")
        try:
            return cls._of(section, str(method), where)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
            raise not_dequantizable(where, f"quantization_config={section!r:.200} ({error!s:.80})") from error

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
        """Return the block (rows, columns) of a matrix according to ``config.json``; None if it is not in 8 bits."""
        module = weight.removesuffix(".weight")
        if not self.blocks or len(shape) != 2 or any(_names(pattern, module) for pattern in self.left_out):
            return None
        rows, columns = self.blocks[0]
        return rows or shape[0], columns or shape[1]


def method_of(found: Mapping[str, Any]) -> Any:
    """Return ``quant_method`` of a ``quantization_config``, None without one; ModelOpt's MXFP8 is ``mxfp8`` too."""
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
                raise ValueError(f"{name:.60} is too slow a regular expression")
            re.compile(name[3:])
    return names


_SLOW, _REPEATS = re.compile(r"\)[*+{?]"), re.compile(r"[*+{]")
"""Slow constructs of regular expressions: repeated groups and consecutive repetitions."""


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def _block(weights: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return the block of a config group of compressed-tensors (its ``quantization/quant_args.py``)."""
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
        raise not_dequantizable(where, f"quantised weights { ({key: weights.get(key) for key in kept}) }")
    return int(size[0]), int(size[1])


def not_dequantizable(where: str, what: str) -> BridgeError:
    """Return the error for a folder whose weights cannot be dequantised exactly."""
    return BridgeError(
        f"{where}: {what} cannot be dequantised exactly; use the bf16 release of the model, or one in fp8, mxfp8, 8 "
        "bits of compressed-tensors (symmetric), or in mxfp4"
    )


FP8, MXFP8 = "fp8", "mxfp8"
MX_COLUMNS = 32
"""Columns that share a scale in MXFP8."""


@dataclass(frozen=True, slots=True)
class EngineForm:
    """Quantised form of an engine's matrices: float8 E4M3 with a scale per block."""

    method: str
    """``fp8`` or ``mxfp8``."""
    block: tuple[int, int]
    """Rows and columns that share a scale; blocks at the end of a matrix may be smaller."""
    powers_of_two: bool
    """Whether scales are powers of two."""

    @property
    def suffix(self) -> str:
        """Suffix of the scales' name after the weight's name."""
        return "_scale_inv" if self.method == FP8 else "_scale"

    @property
    def scale_dtype(self) -> str:
        """Dtype of scales in the engine."""
        return "float32" if self.method == FP8 else "uint8"

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix ``[rows, columns]``."""
        rows, columns = shape
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> EngineForm | None:
        """Parse a ``config.json``; None if the model is not quantised.

        Raises :class:`BridgeError`, with ``where`` as prefix, for a form into which weights cannot be quantised.
        """
        section = config.get("quantization_config")
        if not section:
            return None
        method = method_of(section)
        if method == MXFP8:
            return cls(MXFP8, (1, MX_COLUMNS), True)
        if method != FP8:
            raise _unsupported_form(where, f"quant_method={method!r}")
        block = section.get("weight_block_size")
        is_size = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
        if not is_size:
            raise _unsupported_form(where, f"fp8 with weight_block_size={block}")
        if (scheme := section.get("activation_scheme", "dynamic")) != "dynamic":
            raise _unsupported_form(where, f"fp8 with activation_scheme={scheme!r}")
        if (kind := section.get("fmt", "e4m3")) != "e4m3":
            raise _unsupported_form(where, f"fp8 with fmt={kind!r}")
        return cls(FP8, (int(block[0]), int(block[1])), section.get("scale_fmt") == "ue8m0")


def _unsupported_form(where: str, what: str) -> BridgeError:
    return BridgeError(
        f"{where}: weights can be quantised to fp8 in blocks (weight_block_size, activation_scheme=dynamic) or to "
        f"mxfp8, not to {what}: use a folder in one of these formats, or one without quantisation"
    )
