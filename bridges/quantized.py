"""Quantised HF folders seen as plain bf16, or as the 8-bit values that they hold.

==================  ===================================  =====================================================
``quant_method``    on disk                              written by
==================  ===================================  =====================================================
fp8                 ``W`` in float8, ``W_scale_inv`` of  DeepSeek-V3, Kimi-K2, Qwen3's FP8 releases (their
                    blocks ``weight_block_size``         ``inference/kernel.py``), transformers
mxfp8               ``W`` in float8, ``W_scale`` of 32   MiniMax-M2's, ModelOpt (OCP Microscaling Formats 1.0)
                    columns: uint8, powers of 2
compressed-tensors  ``W_packed``, four int8 and 128 in   llm-compressor (``compressors/pack_quantized`` of
                    an int32, or ``W`` in int8 or        compressed-tensors: int8 of weights alone; ``naive_
                    float8; ``W_scale``                  quantized``: of activations too)
mxfp4               ``W_blocks``, two 4-bit floats a     gpt-oss (OCP Microscaling Formats 1.0: E2M1, low nibble
                    byte, and ``W_scales``, powers of 2  first; on disk transposed against the bf16 layout)
==================  ===================================  =====================================================

``W`` is the name of a weight. 8 bits: ``w = bf16(fp32(q) · scale)``, see :class:`bridges.scaled.ScaledMatrix`. Tensors
are dequantised one at a time as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_io import HfFolder
from bridges.quantisation import Quantisation, unfit
from bridges.rows import Shape
from bridges.scaled import ScaledMatrix, of_blocks

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALE = "_scale_inv"
SCALE, PACKED, PACKED_SHAPE = "_scale", "_packed", "_shape"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCKS, SCALES = "_blocks", "_scales"


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bytes ``[…, m, n/32, 16]`` and exponents ``[…, m, n/32]`` → bf16 ``[…, m, n]``."""
    values = torch.tensor(FP4_VALUES)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.int().sub(127).unsqueeze(-1))
    return scaled.to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True, slots=True)
class _Place:
    """The tensors on disk that a weight of 8 bits is made of."""

    values: str
    scales: str
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def packed(self) -> bool:
        return self.values.endswith(PACKED)


class DequantizedFolder:
    """A quantised HF folder under the names, shapes and dtype of its bf16 original."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        self.path: Path = folder.path
        found = Quantisation.of(folder.config, f"{self.path}/config.json")
        assert found is not None
        self.method, self._blocks = found.method, found.blocks
        self.config = self._plain_config()
        self._scaled: dict[str, _Place] = {}
        self._suffix = FP8_SCALE if self.method == "fp8" else SCALE
        read = {"fp8": self._fp8, "mxfp8": self._fp8, "compressed-tensors": self._compressed, "mxfp4": self._mxfp4}
        self._shapes: dict[str, Shape] = dict(read[self.method]())

    def _plain_config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.folder.config.items() if key != "quantization_config"}
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = "bfloat16"
        return config

    def _fp8(self) -> Iterator[tuple[str, Shape]]:
        ending = FP8_SCALE if self.method == "fp8" else f"weight{SCALE}"  # other tensors are scales of a model, too
        for name, info in self.folder.tensors.items():
            if name.endswith(ending):
                self._belongs(name, name.removesuffix(self._suffix))
                continue
            if info.dtype in FP8:
                self._scaled[name] = self._place(name, name + self._suffix, info.shape, self._blocks)
            yield name, info.shape

    def _compressed(self) -> Iterator[tuple[str, Shape]]:
        tensors, groups = self.folder.tensors, self._blocks
        for name, info in tensors.items():
            if name.endswith((f"weight{SCALE}", f"weight{PACKED_SHAPE}")):
                plain = name[: name.rindex("_")]
                self._belongs(name, plain + PACKED if plain + PACKED in tensors else plain)
            elif name.endswith(("weight_zero_point", "weight_g_idx")):
                raise unfit(
                    f"{self.path}", f"{name} (of a quantisation that is not symmetric, or in an order of its own)"
                )
            elif name.endswith(f"weight{PACKED}"):
                plain, shape = name.removesuffix(PACKED), self.folder.read(name.removesuffix(PACKED) + PACKED_SHAPE)
                self._scaled[plain] = self._place(name, plain + SCALE, tuple(shape.tolist()), groups)
                yield plain, self._scaled[plain].shape
            else:
                if info.dtype in (*FP8, torch.int8):
                    self._scaled[name] = self._place(name, name + SCALE, info.shape, groups)
                yield name, info.shape

    def _belongs(self, name: str, owner: str) -> None:
        if owner not in self.folder.tensors:
            raise BridgeError(f"{self.path}: {name} belongs to no tensor; fetch the folder again")

    def _place(self, values: str, scales: str, shape: Shape, blocks: tuple[tuple[int, int], ...]) -> _Place:
        """Return where a weight of ``shape`` lies; its block is that of ``blocks`` whose number its scales have."""
        info = self.folder.tensors.get(scales)
        rows, columns = shape
        expected: dict[Shape, tuple[int, int]] = {}
        for height, width in blocks:
            block = (height or rows, width or columns)
            expected.setdefault((-(-rows // block[0]), -(-columns // block[1])), block)
        found = None if info is None else info.shape
        grid = (1, 1) if found in ((), (1,)) else found
        if grid is None or grid not in expected:
            raise BridgeError(
                f"{self.path}: {scales} is {'missing' if found is None else list(found)}, expected "
                f"{' or '.join(str(list(each)) for each in expected)} for blocks of "
                f"{' or '.join(str(list(each)) for each in expected.values())}; fetch the folder again"
            )
        return _Place(values, scales, (rows, columns), expected[grid])

    def _mxfp4(self) -> Iterator[tuple[str, Shape]]:
        for name, info in self.folder.tensors.items():
            if name.endswith(BLOCKS):
                plain = name.removesuffix(BLOCKS)
                scale = self.folder.tensors.get(plain + SCALES)
                if scale is None or len(info.shape) != 4 or scale.shape != info.shape[:-1]:
                    found = "missing" if scale is None else list(scale.shape)
                    raise BridgeError(
                        f"{self.path}: {plain}{SCALES} is {found}, expected {list(info.shape[:-1])}; fetch the folder "
                        "again"
                    )
                experts, rows, groups, width = info.shape
                yield plain, (experts, groups * width * 2, rows)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in self.folder.tensors):
                yield name, info.shape

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor, as in a bf16 folder."""
        return dict(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """bf16 for what is dequantised, else the dtype on disk."""
        if name in self._scaled or name not in self.folder.tensors:
            return torch.bfloat16
        return self.folder.dtype(name)

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns of a weight's blocks of 8-bit values; None where it is something else."""
        place = self._scaled.get(name)
        return None if place is None else place.block

    @property
    def in_8_bits(self) -> frozenset[str]:
        """The weights that have a :meth:`block`."""
        return frozenset(self._scaled)

    def read_scaled(self, name: str) -> ScaledMatrix:
        """Return a weight that has a :meth:`block` as it is quantised."""
        place = self._scaled[name]
        values = self.folder.read(place.values)
        if place.packed:
            values = (values.view(torch.uint8)[:, : place.shape[1]] ^ 0x80).view(torch.int8)
        scales = self.folder.read(place.scales)
        if self.method == "mxfp8":
            scales = torch.exp2(scales.float() - 127).masked_fill(scales == 255, torch.nan)  # E8M0's one NaN
        return of_blocks(values, scales.view(1, 1) if scales.dim() < 2 else scales, place.block)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor, or its slice ``[index]``, dequantised if it is quantised."""
        if name in self._scaled:
            whole = self.read_scaled(name).dequantized()
            return whole if index is None else whole[index]
        if name not in self.folder.tensors:
            blocks = self.folder.read(name + BLOCKS, index)
            scales = self.folder.read(name + SCALES, index)
            return dequantize_mxfp4(blocks, scales).transpose(-1, -2)
        return self.folder.read(name, index)
