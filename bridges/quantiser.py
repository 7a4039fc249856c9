"""Matrices brought into the 8 bits that an engine keeps, bit for bit as vLLM 0.32's own quantisers bring them on CPU:
``per_block_cast_to_fp8`` (``vllm/utils/deep_gemm.py``) and ``_mxfp8_e4m3_quantize_torch`` (``mxfp8_utils.py``).

In two steps, because a matrix may lie in shards of several ranks, whose edges go through blocks: the largest |w| of
each block, which ranks can take the maximum of, and then the values, a row at a time, from the scales that this gives.
A block of zeros gets the smallest scale; one with a NaN is NaN altogether; of one with an infinity fp8 keeps zeros and
NaNs, MXFP8 what 2^127 leaves of its numbers, and NaN for the infinity. That is what vLLM's do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bridges.engine_form import FP8, EngineForm
from bridges.scaled import BAND

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
