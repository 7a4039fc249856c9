"""Log-probs of several tokens per position over a vocabulary that is split over tp: the likeliest, or given ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.runtime.vocab_parallel import SoftmaxSettings


def top_logprobs(logits: Tensor, k: int, group: dist.ProcessGroup, settings: SoftmaxSettings) -> tuple[Tensor, Tensor]:
    """Return (log-probs [P, k] float32 in nats, token ids [P, k] int64) of the ``k`` likeliest tokens, likeliest
    first.

    ``logits``: [P, V_padded / tp], this rank's columns; the result is equal on every rank of ``group``. ``k`` is at
    most ``settings.vocab_size``. Not differentiable.
    """
    first, real = _columns(logits, group, settings)
    values = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    for rows in _chunks(len(logits), settings):
        z = logits[rows, :real].float() / settings.temperature
        here = min(k, real)
        best = z.topk(here, dim=-1)
        found = torch.full((len(z), k), -torch.inf, dtype=torch.float32, device=z.device)
        named = torch.zeros(len(z), k, dtype=torch.int64, device=z.device)
        found[:, :here], named[:, :here] = best.values, best.indices + first
        if group.size() > 1:
            found, named = (_side_by_side(each, group) for each in (found, named))
        chosen = found.topk(k, dim=-1)
        values[rows] = chosen.values - _log_z(z, group)[:, None]
        ids[rows] = named.gather(1, chosen.indices)
    return values, ids


def logprobs_of(logits: Tensor, ids: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings) -> Tensor:
    """Return the log-prob of each of ``ids`` [P, k] int64 at its position: [P, k] float32, nats, differentiable.

    ``logits`` as in :func:`top_logprobs`; each rank gets the gradient of its own columns.
    """
    found: Tensor = _Given.apply(logits, ids, group, settings)  # type: ignore[no-untyped-call]
    return found


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings) -> Tensor:
        first, real = _columns(logits, group, settings)
        found = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        log_z = torch.empty(len(ids), dtype=torch.float32, device=logits.device)
        for rows in _chunks(len(logits), settings):
            z = logits[rows, :real].float() / settings.temperature
            local, here = _local(ids[rows], first, real)
            part = torch.where(here, z.gather(1, local), 0.0) if real else torch.zeros_like(found[rows])
            if group.size() > 1:
                dist.all_reduce(part, group=group)
            log_z[rows] = _log_z(z, group)
            found[rows] = part - log_z[rows, None]
        ctx.save_for_backward(logits, ids, log_z)
        ctx.columns, ctx.settings = (first, real), settings
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits, ids, log_z), (first, real), settings = ctx.saved_tensors, ctx.columns, ctx.settings
        out = torch.zeros_like(logits)
        for rows in _chunks(len(logits), settings):
            z = logits[rows, :real].float() / settings.temperature
            local, here = _local(ids[rows], first, real)
            given = grads[0][rows].float()
            grad = (z - log_z[rows, None]).exp_().mul_(-given.sum(-1, keepdim=True))
            if real:
                grad.scatter_add_(1, local, torch.where(here, given, 0.0))
            out[rows, :real] = (grad / settings.temperature).to(out.dtype)
        return out, None, None, None


def _columns(logits: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings) -> tuple[int, int]:
    """Return (token id of this rank's first column, its columns that are not vocabulary padding)."""
    width = logits.shape[1]
    first = group.rank() * width
    return first, max(0, min(width, settings.vocab_size - first))


def _local(ids: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    local = ids - first
    here = (local >= 0) & (local < real)
    return torch.where(here, local, 0), here


def _log_z(z: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the logarithm of the partition function, [rows]; ``z``: this rank's columns, perhaps none."""
    peak = z.amax(-1) if z.shape[1] else torch.full((len(z),), -torch.inf, dtype=z.dtype, device=z.device)
    if group.size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    total = (z - peak[:, None]).exp().sum(-1)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.log() + peak


def _side_by_side(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _chunks(tokens: int, settings: SoftmaxSettings) -> Iterator[slice]:
    size = settings.chunk_size or max(tokens, 1)
    return (slice(start, start + size) for start in range(0, tokens, size))
