"""Matrices of 8-bit values with block scales: dequantise HF folders, and quantise weights as vLLM 0.32 does.

Quantisation has two steps, because the shards of several ranks may share a block. First the largest |w| of each block
is computed, over which ranks take the maximum. Then the values are quantised row by row with the resulting scales.
Special values are the same as in vLLM: a block of zeros gets the smallest scale; a block with a NaN becomes NaN. In a
block with an infinity, fp8 gives zeros and NaNs; MXFP8 divides by 2^127 and gives NaN for the infinity.

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

``W`` is the name of a weight. For 8 bits, ``w = bf16(fp32(q) · scale)`` (:class:`ScaledMatrix`). Tensors are
dequantised one at a time when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.files import holds_text_model
from bridges.hf_io import HfFolder
from bridges.quantisation import FP8, EngineForm, Quantisation, not_dequantizable
from bridges.rows import Shape

BAND = 2**24
"""Number of values that are dequantised at once; their fp32 products take 64 MiB."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A quantised matrix: w[i, j] = bf16(fp32(values[i, j]) · scales[i, (first + j) // columns]).

    On disk a block may have several rows; here each row has its own scales, so that slicing or reordering rows applies
    to both tensors. Incomplete blocks, at the end of the matrix or after a split of its columns, need no padding.
    """

    values: Tensor
    """[…, m, n] float8 or int8."""
    scales: Tensor
    """[…, m, ⌈(first + n) / columns⌉] fp32."""
    columns: int
    """Columns of a block."""
    first: int = 0
    """Position of the first column in its block."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return […, m, n], rounded to bf16 and then cast to ``dtype``."""
        out = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        width = self.values.shape[-1]
        step = max(1, BAND // max(1, width))
        rows = (out.view(-1, width), self.values.view(-1, width), self.scales.view(-1, self.scales.shape[-1]))
        for band, values, scales in zip(*(each.split(step) for each in rows), strict=True):
            band.copy_(self._products(values.float(), scales).to(torch.bfloat16))
        return out

    def _products(self, values: Tensor, scales: Tensor) -> Tensor:
        width = values.shape[1]
        if width == self.columns * scales.shape[1]:  # whole blocks: broadcast instead of repeating the scales
            blocks = values.view(len(values), -1, self.columns)
            return blocks.mul_(scales.unsqueeze(-1)).view(-1, width)
        return values.mul_(scales.repeat_interleave(self.columns, -1)[:, self.first : self.first + width])

    def rows(self, change: Callable[[Tensor], Tensor]) -> ScaledMatrix:
        """Apply ``change``, which slices or reorders the rows of [out, in] or [experts, out, in]."""
        return replace(self, values=_as_bytes(self.values, change), scales=change(self.scales))

    def share(self, size: int, rank: int) -> ScaledMatrix:
        """Return the columns of ``rank`` out of ``size``."""
        values = self.values.chunk(size, -1)[rank]
        start = self.first + rank * values.shape[-1]
        blocks = slice(start // self.columns, -(-(start + values.shape[-1]) // self.columns))
        return ScaledMatrix(values, self.scales[..., blocks], self.columns, start % self.columns)

    def each(self) -> Iterator[ScaledMatrix]:
        """Yield the matrices of the leading axis."""
        for values, scales in zip(self.values, self.scales, strict=True):
            yield replace(self, values=values, scales=scales)


def _as_bytes(values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change`` to the bytes of float8 values, because few torch functions support float8."""
    return change(values.view(torch.uint8)).view(values.dtype)


def join_matrices(matrices: list[ScaledMatrix], join: Callable[[list[Tensor]], Tensor]) -> ScaledMatrix:
    """Join matrices [out, in] with the same block width; ``join`` concatenates or reorders their rows, or stacks
    them."""
    first = matrices[0]
    assert all((each.columns, each.first) == (first.columns, first.first) for each in matrices)
    values = join([each.values.view(torch.uint8) for each in matrices]).view(first.values.dtype)
    return replace(first, values=values, scales=join([each.scales for each in matrices]))


def matrix_of_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> ScaledMatrix:
    """Return the matrix of ``values`` [m, n] and ``scales`` [⌈m / rows⌉, ⌈n / columns⌉] of blocks [rows, columns]."""
    return ScaledMatrix(values, scales.float().repeat_interleave(block[0], 0)[: len(values)], block[1])


E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value of E4M3."""
NAN = 255
"""MXFP8 scale of a block with a NaN in this module. vLLM uses scale 0 and NaN values."""
_LEAST = 1e-4
"""Lower bound of a block's largest |w| in fp8."""


def new_block_max(form: EngineForm, shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Return the initial block maxima of a matrix: ``[grid]`` int32, the bits of 0.0."""
    return torch.zeros(form.grid(shape), dtype=torch.int32, device=device)


def update_block_max(form: EngineForm, largest: Tensor, rows: Tensor, numbers: Tensor, column: int = 0) -> None:
    """Update the block maxima ``largest`` ``[grid]`` int32 with ``rows`` ``[n, columns]`` of a matrix.

    ``numbers``: ``[n]`` int64, the row numbers; ``column``: the first column. Maxima are the bits of |w| in fp32: they
    have the order of the numbers, and NaN is above infinity, while float comparisons would lose it.
    """
    height, width = form.block
    first = column // width
    for part, of_part in _bands(rows, numbers):
        bits = part.float().abs().view(torch.int32)
        bits = torch.nn.functional.pad(bits, (column % width, -(column + rows.shape[1]) % width))
        blocks = bits.view(len(part), -1, width).amax(-1)
        places = (of_part // height).unsqueeze(1).expand_as(blocks)
        largest[:, first : first + blocks.shape[1]].scatter_reduce_(0, places, blocks, "amax")


def block_scales(form: EngineForm, largest: Tensor) -> Tensor:
    """Return the block scales ``[grid]``: fp32, or for MXFP8 uint8 exponents, :data:`NAN` for blocks with a NaN."""
    if form.method == FP8:
        scales = largest.view(torch.float32).clamp(_LEAST) / LARGEST
        return torch.pow(2.0, torch.ceil(torch.log2(scales.abs()))) if form.powers_of_two else scales
    found = largest.view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    exponents = (torch.ceil(torch.log2(found / LARGEST)) + 127.0).clamp(0, 254)
    return torch.where(exponents.isnan(), float(NAN), exponents).to(torch.uint8)


def engine_scales(form: EngineForm, scales: Tensor) -> Tensor:
    """Return ``scales`` [rows, columns] of the grid in the engine's form, in their dtype."""
    return scales if form.method == FP8 else scales.masked_fill(scales == NAN, 0)


def quantised_rows(form: EngineForm, rows: Tensor, scales: Tensor, numbers: Tensor, column: int = 0) -> Tensor:
    """Quantise ``rows`` to ``[n, columns]`` float8 E4M3; other arguments as in :func:`update_block_max`."""
    height, width = form.block
    last, start = column + rows.shape[1], column % width
    out = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
    written = 0
    for part, of_part in _bands(rows, numbers):
        blocks = scales[of_part // height, column // width : -(-last // width)]
        if form.method == FP8:
            factors = 1.0 / blocks
        else:
            factors = torch.exp2(blocks.float() - 127.0).masked_fill(blocks == NAN, float("nan"))
        per_column = factors.repeat_interleave(width, -1)[:, start : start + rows.shape[1]]
        values = part.float()
        made = values * per_column if form.method == FP8 else values / per_column
        out[written : written + len(part)] = made.to(E4M3)
        written += len(part)
    return out


def _bands(rows: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split rows and their numbers into bands, which bounds the memory of their fp32 values."""
    step = max(1, BAND // max(1, rows.shape[1]))
    yield from zip(rows.split(step), numbers.split(step), strict=True)


def quantise(form: EngineForm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a whole matrix: return values ``[m, n]`` float8 E4M3 and scales ``[grid]`` as on disk."""
    numbers = torch.arange(len(weight), device=weight.device)
    largest = new_block_max(form, tuple(weight.shape), weight.device)
    update_block_max(form, largest, weight, numbers)
    scales = block_scales(form, largest)
    return quantised_rows(form, weight, scales, numbers), engine_scales(form, scales)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALE = "_scale_inv"
SCALE, PACKED, PACKED_SHAPE = "_scale", "_packed", "_shape"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCKS, SCALES = "_blocks", "_scales"


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise bytes ``[…, m, n/32, 16]`` and exponents ``[…, m, n/32]`` to bf16 ``[…, m, n]``."""
    values = torch.tensor(FP4_VALUES)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.int().sub(127).unsqueeze(-1))
    return scaled.to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True, slots=True)
class _QuantizedWeight:
    """The tensors on disk of an 8-bit weight."""

    values: str
    scales: str
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def packed(self) -> bool:
        return self.values.endswith(PACKED)


class DequantizedFolder:
    """A quantised HF folder, read with the names, shapes and dtype of the bf16 model."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder, self.form = folder, folder.form
        self.path: Path = folder.path
        if holds_text_model(folder.config):
            raise BridgeError(
                f"{self.path}/config.json has a quantization_config: of models of text and images only folders that "
                "are not quantised are read; use the bf16 one"
            )
        quantisation = Quantisation.of(folder.config, f"{self.path}/config.json")
        assert quantisation is not None
        self.method, self._blocks = quantisation.method, quantisation.blocks
        self.config = self._plain_config()
        self._scaled: dict[str, _QuantizedWeight] = {}
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
        ending = FP8_SCALE if self.method == "fp8" else f"weight{SCALE}"  # other names with _scale may be weights
        for name, info in self.folder.tensors.items():
            if name.endswith(ending):
                self._check_owner(name, name.removesuffix(self._suffix))
                continue
            if info.dtype in FLOAT8:
                self._scaled[name] = self._weight(name, name + self._suffix, info.shape, self._blocks)
            yield name, info.shape

    def _compressed(self) -> Iterator[tuple[str, Shape]]:
        tensors, groups = self.folder.tensors, self._blocks
        for name, info in tensors.items():
            if name.endswith((f"weight{SCALE}", f"weight{PACKED_SHAPE}")):
                plain = name[: name.rindex("_")]
                self._check_owner(name, plain + PACKED if plain + PACKED in tensors else plain)
            elif name.endswith(("weight_zero_point", "weight_g_idx")):
                raise not_dequantizable(
                    f"{self.path}", f"{name} (asymmetric quantisation or a separate order of columns)"
                )
            elif name.endswith(f"weight{PACKED}"):
                plain, shape = name.removesuffix(PACKED), self.folder.read(name.removesuffix(PACKED) + PACKED_SHAPE)
                self._scaled[plain] = self._weight(name, plain + SCALE, tuple(shape.tolist()), groups)
                yield plain, self._scaled[plain].shape
            else:
                if info.dtype in (*FLOAT8, torch.int8):
                    self._scaled[name] = self._weight(name, name + SCALE, info.shape, groups)
                yield name, info.shape

    def _check_owner(self, name: str, owner: str) -> None:
        if owner not in self.folder.tensors:
            raise BridgeError(f"{self.path}: {name} belongs to no tensor; fetch the folder again")

    def _weight(self, values: str, scales: str, shape: Shape, blocks: tuple[tuple[int, int], ...]) -> _QuantizedWeight:
        """Return a weight of ``shape`` with the block among ``blocks`` that matches the shape of its scales."""
        info = self.folder.tensors.get(scales)
        rows, columns = shape
        expected: dict[Shape, tuple[int, int]] = {}
        for height, width in blocks:
            block = (height or rows, width or columns)
            expected.setdefault((-(-rows // block[0]), -(-columns // block[1])), block)
        shape_there = None if info is None else info.shape
        grid = (1, 1) if shape_there in ((), (1,)) else shape_there
        if grid is None or grid not in expected:
            raise BridgeError(
                f"{self.path}: {scales} is {'missing' if shape_there is None else list(shape_there)}, expected "
                f"{' or '.join(str(list(possible)) for possible in expected)} for blocks of "
                f"{' or '.join(str(list(possible)) for possible in expected.values())}; fetch the folder again"
            )
        return _QuantizedWeight(values, scales, (rows, columns), expected[grid])

    def _mxfp4(self) -> Iterator[tuple[str, Shape]]:
        for name, info in self.folder.tensors.items():
            if name.endswith(BLOCKS):
                plain = name.removesuffix(BLOCKS)
                scale = self.folder.tensors.get(plain + SCALES)
                if scale is None or len(info.shape) != 4 or scale.shape != info.shape[:-1]:
                    shape_there = "missing" if scale is None else list(scale.shape)
                    raise BridgeError(
                        f"{self.path}: {plain}{SCALES} is {shape_there}, expected {list(info.shape[:-1])}; fetch the "
                        "folder again"
                    )
                experts, rows, groups, width = info.shape
                yield plain, (experts, groups * width * 2, rows)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in self.folder.tensors):
                yield name, info.shape

    def shapes(self) -> dict[str, Shape]:
        """Return name → shape of every tensor, as in a bf16 folder."""
        return dict(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """Return bf16 for dequantised tensors, else the dtype on disk."""
        if name in self._scaled or name not in self.folder.tensors:
            return torch.bfloat16
        return self.folder.dtype(name)

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the block (rows, columns) of an 8-bit weight; None for any other tensor."""
        weight = self._scaled.get(name)
        return None if weight is None else weight.block

    @property
    def in_8_bits(self) -> frozenset[str]:
        """The 8-bit weights."""
        return frozenset(self._scaled)

    def read_scaled(self, name: str) -> ScaledMatrix:
        """Return an 8-bit weight without dequantising it."""
        weight = self._scaled[name]
        values = self.folder.read(weight.values)
        if weight.packed:
            values = (values.view(torch.uint8)[:, : weight.shape[1]] ^ 0x80).view(torch.int8)
        scales = self.folder.read(weight.scales)
        if self.method == "mxfp8":
            scales = torch.exp2(scales.float() - 127).masked_fill(scales == 255, torch.nan)  # 255 is NaN in E8M0
        return matrix_of_blocks(values, scales.view(1, 1) if scales.dim() < 2 else scales, weight.block)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return the tensor, or its slice ``[index]``, dequantised if necessary."""
        if name in self._scaled:
            whole = self.read_scaled(name).dequantized()
            return whole if index is None else whole[index]
        if name not in self.folder.tensors:
            blocks = self.folder.read(name + BLOCKS, index)
            scales = self.folder.read(name + SCALES, index)
            return dequantize_mxfp4(blocks, scales).transpose(-1, -2)
        return self.folder.read(name, index)
