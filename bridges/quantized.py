"""Matrices of 8-bit values with block scales: quantised folders read as bf16, and matrices quantised as vLLM 0.32
does.

In two steps, because a matrix may lie in shards of several ranks, whose edges go through blocks: the largest |w| of
each block, which ranks can take the maximum of, and then the values, a row at a time, from the scales that this gives.
A block of zeros gets the smallest scale; one with a NaN is NaN altogether; of one with an infinity fp8 keeps zeros and
NaNs, MXFP8 what 2^127 leaves of its numbers, and NaN for the infinity. That is what vLLM's do.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridges.errors import BridgeError
from bridges.hf_io import HfFolder
from bridges.quantisation import FP8, EngineForm, Quantisation, unfit
from bridges.rows import Shape

BAND = 2**24
"""Values that are dequantised at a time: their fp32 products are 64 MiB."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """w[i, j] = bf16(fp32(values[i, j]) · scales[i, (first + j) // columns]).

    A block has several rows on disk; here each row has its scales, so that what cuts or orders rows does the same to
    both. Blocks that are cut short by the matrix's end, or by a split of its columns, need no padding.
    """

    values: Tensor
    """[…, m, n] float8 or int8."""
    scales: Tensor
    """[…, m, ⌈(first + n) / columns⌉] fp32."""
    columns: int
    """Of a block."""
    first: int = 0
    """Where in its block the first column stands."""

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return […, m, n], rounded to bf16 and then given as ``dtype``; a band of rows at a time."""
        out = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        width = self.values.shape[-1]
        step = max(1, BAND // max(1, width))
        rows = (out.view(-1, width), self.values.view(-1, width), self.scales.view(-1, self.scales.shape[-1]))
        for band, values, scales in zip(*(each.split(step) for each in rows), strict=True):
            band.copy_(self._products(values.float(), scales).to(torch.bfloat16))
        return out

    def _products(self, values: Tensor, scales: Tensor) -> Tensor:
        width = values.shape[1]
        if width == self.columns * scales.shape[1]:  # whole blocks: no scale is written out
            blocks = values.view(len(values), -1, self.columns)
            return blocks.mul_(scales.unsqueeze(-1)).view(-1, width)
        return values.mul_(scales.repeat_interleave(self.columns, -1)[:, self.first : self.first + width])

    def rows(self, change: Callable[[Tensor], Tensor]) -> ScaledMatrix:
        """Return what ``change``, which cuts or orders rows, makes of it."""
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
    """Apply ``change`` to float8 too, which few of torch's functions take."""
    return change(values.view(torch.uint8)).view(values.dtype)


def together(matrices: list[ScaledMatrix], join: Callable[[list[Tensor]], Tensor]) -> ScaledMatrix:
    """Return one matrix of several with blocks as wide; ``join`` puts their rows together, or stacks them."""
    first = matrices[0]
    assert all((each.columns, each.first) == (first.columns, first.first) for each in matrices)
    values = join([each.values.view(torch.uint8) for each in matrices]).view(first.values.dtype)
    return replace(first, values=values, scales=join([each.scales for each in matrices]))


def of_blocks(values: Tensor, scales: Tensor, block: tuple[int, int]) -> ScaledMatrix:
    """Return the matrix of ``values`` [m, n] and ``scales`` [⌈m / rows⌉, ⌈n / columns⌉] of blocks [rows, columns]."""
    return ScaledMatrix(values, scales.float().repeat_interleave(block[0], 0)[: len(values)], block[1])


E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of E4M3."""
NAN = 255
"""The MXFP8 scale of a block with a NaN here; vLLM's has 0, and NaN in each value."""
_LEAST = 1e-4
"""What fp8 takes the largest |w| of a block to be at least."""


def no_largest(form: EngineForm, shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Return ``[grid]`` int32 of a matrix of which no element was seen: the bits of 0.0."""
    return torch.zeros(form.grid(shape), dtype=torch.int32, device=device)


def add_largest(form: EngineForm, largest: Tensor, rows: Tensor, numbers: Tensor, column: int = 0) -> None:
    """Let ``largest`` ``[grid]`` int32 know ``rows`` ``[n, columns]`` of a matrix: its rows ``numbers`` ``[n]`` int64,
    from ``column`` on.

    |w| as the bits of an fp32 number: they are ordered as the numbers are, and NaN, which comparisons of numbers lose,
    stands above infinity.
    """
    height, width = form.block
    first = column // width
    for part, of_part in _bands(rows, numbers):
        bits = part.float().abs().view(torch.int32)
        bits = torch.nn.functional.pad(bits, (column % width, -(column + rows.shape[1]) % width))
        blocks = bits.view(len(part), -1, width).amax(-1)
        places = (of_part // height).unsqueeze(1).expand_as(blocks)
        largest[:, first : first + blocks.shape[1]].scatter_reduce_(0, places, blocks, "amax")


def scales_of(form: EngineForm, largest: Tensor) -> Tensor:
    """Return the scales ``[grid]`` of blocks: fp32, or for MXFP8 uint8 exponents, :data:`NAN` where a NaN is."""
    if form.method == FP8:
        scales = largest.view(torch.float32).clamp(_LEAST) / LARGEST
        return torch.pow(2.0, torch.ceil(torch.log2(scales.abs()))) if form.powers_of_two else scales
    found = largest.view(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    exponents = (torch.ceil(torch.log2(found / LARGEST)) + 127.0).clamp(0, 254)
    return torch.where(exponents.isnan(), float(NAN), exponents).to(torch.uint8)


def as_sent(form: EngineForm, scales: Tensor) -> Tensor:
    """Return ``scales`` as engines take them."""
    return scales if form.method == FP8 else scales.masked_fill(scales == NAN, 0)


def quantised_rows(form: EngineForm, rows: Tensor, scales: Tensor, numbers: Tensor, column: int = 0) -> Tensor:
    """Return ``[n, columns]`` float8 E4M3 of ``rows``; the arguments are those of :func:`add_largest`."""
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
        each = factors.repeat_interleave(width, -1)[:, start : start + rows.shape[1]]
        values = part.float()
        made = values * each if form.method == FP8 else values / each
        out[written : written + len(part)] = made.to(E4M3)
        written += len(part)
    return out


def _bands(rows: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut rows and their numbers into bands, so that their fp32 values take little memory."""
    step = max(1, BAND // max(1, rows.shape[1]))
    yield from zip(rows.split(step), numbers.split(step), strict=True)


def quantise(form: EngineForm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values ``[m, n]`` float8 E4M3 and scales ``[grid]``, as they are on disk, of a whole matrix."""
    numbers = torch.arange(len(weight), device=weight.device)
    largest = no_largest(form, tuple(weight.shape), weight.device)
    add_largest(form, largest, weight, numbers)
    scales = scales_of(form, largest)
    return quantised_rows(form, weight, scales, numbers), as_sent(form, scales)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
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
            if info.dtype in FLOAT8:
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
                if info.dtype in (*FLOAT8, torch.int8):
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
