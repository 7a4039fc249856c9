"""Softmax over a vocabulary shard: its kernels, and the tokens kept by top-k, top-p or min-p."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

FLOOR = -1e30
"""Replaces −∞ in excluded columns: exp(FLOOR) is 0, and 0 · FLOOR is not NaN."""
BLOCK_BYTES = 1 << 20
"""Size of one of the two fp32 buffers."""


@dataclass(frozen=True, slots=True)
class Support:
    """The vocabulary entries that each of P tokens was sampled from. A token without entries: the whole vocabulary."""

    ids: Tensor
    """[N] int64: entries of all tokens, concatenated."""
    tokens: Tensor
    """[N] int64 in [0, P): the token of each entry."""
    whole: Tensor
    """[P] bool: tokens without entries."""
    starts: np.ndarray
    """[P + 1] int64: offsets of the tokens in ``ids``; on the host, so that slicing needs no synchronisation."""

    @classmethod
    def of(cls, ids: np.ndarray, counts: np.ndarray, device: torch.device) -> Support:
        """Build a support from the concatenated entries ``ids`` and the number of entries of each token, [P]."""
        tokens = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(counts == 0).to(device),
            starts,
        )

    def kept(self, rows: slice, first: int, width: int) -> Tensor | None:
        """Return [rows, width] bool: the kept ones of ``width`` columns from ``first``; None if all rows keep all."""
        entries = slice(int(self.starts[rows.start]), int(self.starts[rows.stop]))
        if entries.start == entries.stop:
            # no kernel needs a mask then, which saves [rows, width] bytes and a pass over them
            return None
        column = self.ids[entries] - first
        column = torch.where((column >= 0) & (column < width), column, width)  # other ranks' entries, dropped below
        # one column more, into which entries of other ranks fall: filtering them would wait for the device
        marked = self.whole[rows, None].repeat(1, width + 1)
        marked[self.tokens[entries] - rows.start, column] = True
        return marked[:, :width]


class Kernel(Protocol):
    """Forward and backward pass over the logits x of n tokens, [n, v] of any float dtype; in fp32, of fp64 in fp64.

    ``targets``: [n] int64, the target's column, −1 if it is not among these v. ``kept``: [n, v] bool, the columns over
    which the softmax is taken, including the target; None: all. s = (x − peak) / temperature.
    """

    def statistics(
        self, logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
    ) -> Tensor:
        """Return [4, n]: peak = max x; Σ exp(s); for the entropy Σ exp(s)·s; x of the target, 0 if not here.

        Both sums exclude the target, so that 1 − p is exact for a token with p near 1. Without a kept column the peak
        is ``FLOOR``.
        """

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        coefficients: Tensor,
        out: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> None:
        """Write exp(s)·(a + b·s) to ``out`` [n, v], and t at the target. ``out`` may be ``logits``.

        ``coefficients``: [4, n] fp32: peak, a, b (not read without entropy), t.
        """


class TorchKernel:
    """The kernel in torch operations, for the CPU, and for GPUs without Triton.

    It processes blocks of rows in buffers that fit the processor's cache. Without blocks, each operation on
    [1024, 65536] would read and write main memory.
    """

    @staticmethod
    def statistics(
        logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
    ) -> Tensor:
        """Reduce the columns of each token, [n, v], to four numbers, [4, n] (``Kernel.statistics``)."""
        numbers = logits.new_zeros(4, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
        if not logits.shape[1]:
            # a rank whose columns are all padding: exp(FLOOR − peak) is 0 whatever the others have
            numbers[0] = FLOOR
            return numbers
        for rows, s, weights in _blocks(logits):
            peak, total, moment, target = numbers[:, rows]
            s.copy_(logits[rows])
            if kept is not None:
                s.masked_fill_(~kept[rows], FLOOR)
            torch.amax(s, 1, out=peak)
            here, column = targets[rows] >= 0, targets[rows, None].clamp(min=0)
            values = s.gather(1, column).squeeze(1)
            target.copy_(torch.where(here, values, 0.0))
            # the target leaves the sum, so that the sum is exactly that of the others
            s.scatter_(1, column, torch.where(here, FLOOR, values)[:, None])
            s.sub_(peak[:, None])
            # a division of the whole block less in the usual case
            if temperature != 1.0:
                s.div_(temperature)
            torch.sum(torch.exp(s, out=weights), 1, out=total)
            if with_entropy:
                torch.sum(s.mul_(weights), 1, out=moment)
        return numbers

    @staticmethod
    def gradient(
        logits: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        coefficients: Tensor,
        out: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> None:
        """Write the gradient of the logits to ``out`` [n, v] (``Kernel.gradient``)."""
        for rows, s, p in _blocks(logits) if logits.shape[1] else ():
            peak, a, b, at_target = coefficients[:, rows]
            s.copy_(logits[rows])
            if kept is not None:
                s.masked_fill_(~kept[rows], FLOOR)
            s.sub_(peak[:, None])
            if temperature != 1.0:
                s.div_(temperature)
            torch.exp(s, out=p)
            p.mul_(torch.addcmul(a[:, None], s, b[:, None], out=s) if with_entropy else a[:, None])
            here, column = targets[rows] >= 0, targets[rows, None].clamp(min=0)
            # not computed as p − 1, which would cancel for p near 1: the coefficients have the exact value
            p.scatter_(1, column, torch.where(here, at_target, p.gather(1, column).squeeze(1))[:, None])
            out[rows].copy_(p)


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, two buffers of their shape, fp32 or of fp64 logits fp64) for all rows."""
    n, v = logits.shape
    size = max(1, BLOCK_BYTES // (4 * v))
    # allocated once for all blocks: they stay in the processor's cache
    space = logits.new_empty(2, min(size, n), v, dtype=torch.promote_types(logits.dtype, torch.float32))
    for start in range(0, n, size):
        count = min(size, n - start)
        yield slice(start, start + count), space[0, :count], space[1, :count]
