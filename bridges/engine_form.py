"""How engines keep matrices in 8 bits: what ``quantization_config`` of a ``config.json`` says, where weights can be
brought into that form. Which matrices, the folder itself says (``DequantizedFolder.in_8_bits``).

======== ============================================== ===========================================================
method   ``quantization_config``                        on disk
======== ============================================== ===========================================================
fp8      ``quant_method: fp8``, ``weight_block_size``   ``W`` float8 E4M3, ``W_scale_inv`` fp32 of each block
mxfp8    ``quant_method: mxfp8``, or ``modelopt`` with  ``W`` float8 E4M3, ``W_scale`` uint8 of 32 columns of a row:
         ``quant_algo: MXFP8``                          2^(scale − 127)
======== ============================================== ===========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridges.errors import BridgeError
from bridges.quantisation import method_of

FP8, MXFP8 = "fp8", "mxfp8"
MX_COLUMNS = 32
"""That share a scale in MXFP8."""


@dataclass(frozen=True, slots=True)
class EngineForm:
    """Matrices in float8 E4M3, a scale for each block of them."""

    method: str
    """``fp8`` or ``mxfp8``."""
    block: tuple[int, int]
    """Rows and columns that share a scale; those at the end of a matrix may be cut short."""
    powers_of_two: bool
    """Whether scales are powers of two."""

    @property
    def suffix(self) -> str:
        """What the name of a weight's scales adds to that of the weight."""
        return "_scale_inv" if self.method == FP8 else "_scale"

    @property
    def scale_dtype(self) -> str:
        """Of scales as engines take them."""
        return "float32" if self.method == FP8 else "uint8"

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix ``[rows, columns]``."""
        rows, columns = shape
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> EngineForm | None:
        """Read a ``config.json``; None where nothing is quantised. Raises :class:`BridgeError`, which begins with
        ``where``, for a form that weights cannot be brought into."""
        found = config.get("quantization_config")
        if not found:
            return None
        method = method_of(found)
        if method == MXFP8:
            return cls(MXFP8, (1, MX_COLUMNS), True)
        if method != FP8:
            raise _unfit(where, f"quant_method={method!r}")
        block = found.get("weight_block_size")
        whole = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
        if not whole:
            raise _unfit(where, f"fp8 with weight_block_size={block}")
        if (scheme := found.get("activation_scheme", "dynamic")) != "dynamic":
            raise _unfit(where, f"fp8 with activation_scheme={scheme!r}")
        if (kind := found.get("fmt", "e4m3")) != "e4m3":
            raise _unfit(where, f"fp8 with fmt={kind!r}")
        return cls(FP8, (int(block[0]), int(block[1])), found.get("scale_fmt") == "ue8m0")


def _unfit(where: str, what: str) -> BridgeError:
    return BridgeError(
        f"{where}: weights are brought into fp8 in blocks (weight_block_size, activation_scheme=dynamic) or mxfp8, "
        f"not {what}"
    )
