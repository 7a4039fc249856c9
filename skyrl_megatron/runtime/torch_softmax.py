"""The softmax kernel in torch operations (:class:`~skyrl_megatron.runtime.softmax.Kernel`).

It processes blocks of rows in fp32 buffers that fit the processor's cache. Without blocks, each operation on
[1024, 65536] would read and write main memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FLOOR = -1e30
"""Replaces −∞ in excluded columns: exp(FLOOR) is 0, and 0 · FLOOR is not NaN."""
BLOCK_BYTES = 1 << 20
"""Size of one of the two fp32 buffers."""


def statistics(
    logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
) -> Tensor:
    """Reduce the columns of each token, [n, v], to four numbers, [4, n] fp32 (``Kernel.statistics``)."""
    numbers = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
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
    """Yield (rows, two fp32 buffers of their shape) for all rows."""
    n, v = logits.shape
    size = max(1, BLOCK_BYTES // (4 * v))
    # allocated once for all blocks: they stay in the processor's cache
    space = torch.empty(2, min(size, n), v, dtype=torch.float32, device=logits.device)
    for start in range(0, n, size):
        count = min(size, n - start)
        yield slice(start, start + count), space[0, :count], space[1, :count]
