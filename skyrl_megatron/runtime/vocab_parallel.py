"""Log-probabilities and entropy from logits whose vocabulary is split over tp.

One pass over chunks of tokens computes both in fp32 with two small all-reduces per chunk (maximum, sums). The backward
recomputes the softmax chunk by chunk from the logits, so nothing of size [P, V] is kept but the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _LogprobsAndEntropy(torch.autograd.Function):
    """log p(target) = z_target − log Z;  H = log Z − Σ p z, with z = logits / temperature over the real vocabulary.

    Gradients: ∂logp/∂z_j = 1[j = target] − p_j;  ∂H/∂z_j = −p_j (z_j − Σ p z).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = group.rank() * width
        real = max(0, min(width, vocab_size - first))  # columns of this rank that are not vocabulary padding
        local = targets - first
        here = (local >= 0) & (local < real)
        local = torch.where(here, local, 0)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        log_z, mean_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            z = _scaled(logits[rows, :real], temperature)
            peak = z.amax(-1) if real else torch.full((len(z),), -torch.inf, device=z.device)
            if group.size() > 1:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            if real:
                target = z.gather(1, local[rows, None]).squeeze(1)
            else:
                target = torch.zeros_like(peak)
            target = torch.where(here[rows], target - peak, 0.0)
            shifted = z - peak[:, None]
            weights = shifted.exp()
            sums = [weights.sum(-1), target]
            if with_entropy:
                sums.append((weights * shifted).sum(-1))
            stacked = torch.stack(sums)
            if group.size() > 1:
                dist.all_reduce(stacked, group=group)
            log_sum = stacked[0].log()
            logprobs[rows] = stacked[1] - log_sum
            log_z[rows] = log_sum + peak
            if with_entropy:
                mean_z[rows] = stacked[2] / stacked[0] + peak
        ctx.save_for_backward(logits, local, here, log_z, mean_z)
        ctx.real, ctx.temperature, ctx.chunk, ctx.with_entropy = real, temperature, chunk, with_entropy
        entropy = log_z - mean_z if with_entropy else torch.zeros_like(log_z)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, log_z, mean_z = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad = torch.zeros_like(logits) if ctx.real < logits.shape[-1] else torch.empty_like(logits)
        for start in range(0, len(local), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            z = _scaled(logits[rows, : ctx.real], ctx.temperature)
            p = (z - log_z[rows, None]).exp()
            scale = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                scale = scale - grad_entropy[rows, None] * (z - mean_z[rows, None])
            p.mul_(scale)
            if ctx.real:
                mine = torch.where(here[rows], grad_logprobs[rows], 0.0)
                p.scatter_add_(1, local[rows, None], mine[:, None])
            grad[rows, : ctx.real] = p if ctx.temperature == 1.0 else p.div_(ctx.temperature)
        return grad, None, None, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1.0 else z / temperature


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and, if asked for, the entropy of each distribution; both [P] float32, in nats.

    ``logits``: [P, V_padded / tp], this rank's columns; ``targets``: [P] int64 in [0, ``vocab_size``). Vocabulary
    padding takes no probability. The result is equal on every rank of ``group``; each rank gets the gradient of its
    own columns. ``chunk_size``: tokens handled at once, which bounds the fp32 copies.
    """
    chunk = chunk_size if chunk_size > 0 else max(len(targets), 1)
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, targets, group, vocab_size, temperature, chunk, with_entropy)
    return logprobs, entropy if with_entropy else None
