"""Zig-zag context parallelism: the tokens that a rank holds, and gathering them back with correct gradients.

Each sequence (padded to a multiple of 2·cp) is cut into 2·cp chunks; rank r holds chunks r and 2·cp − 1 − r, so that
causal attention costs every rank the same. A rank's local tensor holds, sequence by sequence, its first, then its
second chunk: what Megatron's rotary embedding for packed sequences expects (models/common/embeddings/rope_utils.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@lru_cache(maxsize=64)
def local_positions(padded_lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """Return where the tokens of ``rank``, in its local order, stand in the packed global order: [P / cp] int64."""
    if cp == 1:
        return torch.arange(sum(padded_lengths))
    pieces, start = [], 0
    for length in padded_lengths:
        chunk = length // (2 * cp)
        for index in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


@lru_cache(maxsize=64)
def global_order(padded_lengths: tuple[int, ...], cp: int) -> Tensor:
    """Return where each token of the packed global order stands in the ranks' tokens laid end to end: [P] int64."""
    held = torch.cat([local_positions(padded_lengths, cp, rank) for rank in range(cp)])
    order = torch.empty_like(held)
    order[held] = torch.arange(len(held))
    return order


class _GatherTokens(torch.autograd.Function):
    """All ranks' tokens in global order.

    ``shared_loss``: every rank computes the same loss from the gathered tensor, so a rank's gradient is its own slice
    of the (equal) gradients. Otherwise (keys and values, used by other queries on each rank) the slices are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup, shared_loss: bool
    ) -> Tensor:
        ctx.padded_lengths, ctx.group, ctx.shared_loss = padded_lengths, group, shared_loss
        local = local.contiguous()
        gathered = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local, group=group)
        return gathered[global_order(padded_lengths, group.size()).to(local.device)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if not ctx.shared_loss:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        mine = local_positions(ctx.padded_lengths, ctx.group.size(), ctx.group.rank())
        return grad[mine.to(grad.device)], None, None, None


def gather_tokens(
    local: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup, *, shared_loss: bool
) -> Tensor:
    """Gather [P / cp, …] of each rank to [P, …] in the packed global order, on every rank; differentiable."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherTokens.apply(local, padded_lengths, group, shared_loss)  # type: ignore[no-untyped-call]
    return gathered


class _Exchange(torch.autograd.Function):
    """Exchanges tokens for heads (``to_heads``) or back; each way is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.lengths, ctx.group, ctx.to_heads = lengths, group, to_heads
        return (_tokens_to_heads if to_heads else _heads_to_tokens)(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _heads_to_tokens if ctx.to_heads else _tokens_to_heads
        return back(grads[0], ctx.lengths, ctx.group), None, None, None


def _tokens_to_heads(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    cp = group.size()
    received = _all_to_all(x.unflatten(1, (cp, -1)).transpose(0, 1), group)  # [rank of the tokens, p, n / cp, …]
    return received.flatten(0, 1)[global_order(lengths, cp).to(x.device)]


def _heads_to_tokens(x: Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    cp = group.size()
    held = torch.cat([local_positions(lengths, cp, rank) for rank in range(cp)]).to(x.device)
    received = _all_to_all(x[held].unflatten(0, (cp, -1)), group)  # [rank of the heads, p, n / cp, …]
    return received.transpose(0, 1).flatten(1, 2)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[rank]`` to each rank of the group; returns what came, by sender."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def tokens_to_heads(x: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Exchange [P / cp, n, …], this rank's tokens of all heads, for [P, n / cp, …], all tokens in the packed global
    order of a cp-th of the heads; differentiable."""
    if group.size() == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, padded_lengths, group, True)  # type: ignore[no-untyped-call]
    return exchanged


def heads_to_tokens(x: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Undo :func:`tokens_to_heads`: [P, n / cp, …] → [P / cp, n, …]."""
    if group.size() == 1:
        return x
    exchanged: Tensor = _Exchange.apply(x, padded_lengths, group, False)  # type: ignore[no-untyped-call]
    return exchanged
