"""Matrices of 8-bit values, and a scale for each block of them: what quantised folders hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
