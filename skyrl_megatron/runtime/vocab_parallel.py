"""Log-probabilities and entropy over a vocabulary that is split over tp: from logits, or from hidden states.

The forward computes both in fp32, chunk by chunk of tokens, with two small all-reduces a chunk (maximum, sums). The
backward recomputes the softmax chunk by chunk, so that nothing of size [P, V] is kept but the logits; from hidden
states (``trainer.fused_lm_head_logprob``) not even those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SoftmaxSettings:
    """How the softmax over the vocabulary is computed."""

    vocab_size: int
    """Entries that are not padding."""
    temperature: float = 1.0
    chunk_size: int = 1024
    """Tokens handled at once, which bounds the fp32 copies; 0: all."""
    with_entropy: bool = False
    compiled: bool = False
    """Fuse the operations on a chunk with ``torch.compile``."""


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target and, if asked for, each distribution's entropy; both [P] float32, in nats.

    ``logits``: [P, V_padded / tp], this rank's columns; ``targets``: [P] int64 in [0, vocab_size). Vocabulary padding
    takes no probability. The result is equal on every rank of ``group``; each rank gets the gradient of its own
    columns.
    """
    logprobs, entropy = _FromLogits.apply(logits, targets, group, settings)  # type: ignore[no-untyped-call]
    return logprobs, entropy if settings.with_entropy else None


def fused_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    settings: SoftmaxSettings,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`logprobs_and_entropy` of the logits ``hidden @ weightᵀ``, of which one chunk exists at a time.

    ``hidden``: [P, H], the same on every rank of ``group``, of which each gets its part of the gradient (to be summed
    over the group); ``weight``: [V_padded / tp, H], this rank's rows. ``low_rank``: (h [P, r], b [V_padded / tp, r]),
    an adapter's, which adds ``h @ bᵀ`` to the logits; h as ``hidden``.
    """
    h, b = low_rank or (None, None)
    logprobs, entropy = _FromHidden.apply(hidden, weight, h, b, targets, group, settings)  # type: ignore[no-untyped-call]
    return logprobs, entropy if settings.with_entropy else None


@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's columns of the vocabulary, and where in them the targets are."""

    group: dist.ProcessGroup
    real: int
    """Columns that are not vocabulary padding."""
    local: Tensor
    """[P] int64: the target's column here; 0 where another rank has it."""
    here: Tensor
    """[P] bool."""

    @classmethod
    def of(cls, targets: Tensor, width: int, group: dist.ProcessGroup, vocab_size: int) -> _Columns:
        first = group.rank() * width
        real = max(0, min(width, vocab_size - first))
        local = targets - first
        here = (local >= 0) & (local < real)
        return cls(group, real, torch.where(here, local, 0), here)


def _softmax(
    logits_of: Callable[[slice], Tensor], columns: _Columns, settings: SoftmaxSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log p(target), log Z, Σ p z), [P] each; z = logits / temperature. ``logits_of``: rows → [rows, real]."""
    tokens = len(columns.local)
    logprobs = torch.empty(tokens, dtype=torch.float32, device=columns.local.device)
    log_z, mean_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
    sums_of = _compiled(_sums) if settings.compiled else _sums
    for rows in _chunks(tokens, settings):
        logits, local, here = logits_of(rows), columns.local[rows], columns.here[rows]
        if columns.real:
            peak = logits.amax(-1).float() / settings.temperature
        else:
            peak = torch.full((len(local),), -torch.inf, dtype=torch.float32, device=local.device)
        if columns.group.size() > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=columns.group)
        if columns.real:
            sums = sums_of(logits, peak, local, here, settings.temperature, settings.with_entropy)
        else:
            sums = torch.zeros(2 + settings.with_entropy, len(local), dtype=torch.float32, device=local.device)
        if columns.group.size() > 1:
            dist.all_reduce(sums, group=columns.group)
        log_sum = sums[0].log()
        logprobs[rows] = sums[1] - log_sum
        log_z[rows] = log_sum + peak
        if settings.with_entropy:
            mean_z[rows] = sums[2] / sums[0] + peak
    return logprobs, log_z, mean_z


def _sums(logits: Tensor, peak: Tensor, local: Tensor, here: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    """Return this rank's part of Σ exp(z − peak), z_target − peak and, for the entropy, Σ exp(z − peak) (z − peak)."""
    shifted = _scaled(logits, temperature) - peak[:, None]
    target = torch.where(here, shifted.gather(1, local[:, None]).squeeze(1), 0.0)
    weights = shifted.exp()
    sums = [weights.sum(-1), target]
    if with_entropy:
        sums.append((weights * shifted).sum(-1))
    return torch.stack(sums)


def _logits_gradient(
    logits: Tensor,
    local: Tensor,
    here: Tensor,
    log_z: Tensor,
    mean_z: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    with_entropy: bool,
) -> Tensor:
    """Return ∂loss/∂logits, [rows, real] fp32: ∂logp/∂z_j = 1[j = target] − p_j;  ∂H/∂z_j = −p_j (z_j − Σ p z)."""
    z = _scaled(logits, temperature)
    scale = -grad_logprobs[:, None]
    if with_entropy:
        scale = scale - grad_entropy[:, None] * (z - mean_z[:, None])
    grad = (z - log_z[:, None]).exp_().mul_(scale)
    grad.scatter_add_(1, local[:, None], torch.where(here, grad_logprobs, 0.0)[:, None])
    return grad if temperature == 1.0 else grad.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1.0 else z / temperature


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _outputs(ctx: Any, logprobs: Tensor, log_z: Tensor, mean_z: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies) of an autograd function; H = log Z − Σ p z."""
    if ctx.settings.with_entropy:
        return logprobs, log_z - mean_z
    entropy = torch.zeros_like(log_z)
    ctx.mark_non_differentiable(entropy)
    return logprobs, entropy


def _gradient(ctx: Any, rows: slice, logits: Tensor, softmax: Sequence[Tensor], grads: tuple[Tensor, ...]) -> Tensor:
    """Return ∂loss/∂logits of some rows, [rows, real] fp32. ``softmax``: local, here, log_z, mean_z."""
    function = _compiled(_logits_gradient) if ctx.settings.compiled else _logits_gradient
    local, here, log_z, mean_z, d_logprobs, d_entropy = (tensor[rows] for tensor in (*softmax, *grads))
    temperature, with_entropy = ctx.settings.temperature, ctx.settings.with_entropy
    return function(logits, local, here, log_z, mean_z, d_logprobs, d_entropy, temperature, with_entropy)


def _chunks(tokens: int, settings: SoftmaxSettings) -> list[slice]:
    size = settings.chunk_size or max(tokens, 1)
    return [slice(start, start + size) for start in range(0, tokens, size)]


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings
    ) -> tuple[Tensor, Tensor]:
        columns = _Columns.of(targets, logits.shape[-1], group, settings.vocab_size)
        logprobs, log_z, mean_z = _softmax(lambda rows: logits[rows, : columns.real], columns, settings)
        ctx.save_for_backward(logits, columns.local, columns.here, log_z, mean_z)
        ctx.settings, ctx.real = settings, columns.real
        return _outputs(ctx, logprobs, log_z, mean_z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, *softmax = ctx.saved_tensors
        grad = torch.empty_like(logits)
        grad[:, ctx.real :] = 0.0
        if ctx.real:
            for rows in _chunks(len(logits), ctx.settings):
                grad[rows, : ctx.real] = _gradient(ctx, rows, logits[rows, : ctx.real], softmax, grads)
        return grad, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        h: Tensor | None,
        b: Tensor | None,
        targets: Tensor,
        group: dist.ProcessGroup,
        settings: SoftmaxSettings,
    ) -> tuple[Tensor, Tensor]:
        columns = _Columns.of(targets, len(weight), group, settings.vocab_size)
        maps = _Maps(hidden, weight[: columns.real], h, None if b is None else b[: columns.real])
        logprobs, log_z, mean_z = _softmax(maps.logits, columns, settings)
        ctx.save_for_backward(hidden, weight, h, b, columns.local, columns.here, log_z, mean_z)
        ctx.settings, ctx.real = settings, columns.real
        return _outputs(ctx, logprobs, log_z, mean_z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, h, b, *softmax = ctx.saved_tensors
        inputs: tuple[Tensor | None, ...] = (hidden, weight, h, b)
        kinds = (hidden.dtype, torch.float32, hidden.dtype, torch.float32)  # weights' are sums over chunks
        found = [
            torch.zeros(tensor.shape, dtype=kind, device=tensor.device) if tensor is not None and needed else None
            for tensor, kind, needed in zip(inputs, kinds, ctx.needs_input_grad, strict=False)
        ]
        d_hidden, d_weight, d_h, d_b = found
        if ctx.real:
            maps = _Maps(hidden, weight[: ctx.real], h, None if b is None else b[: ctx.real])
            for rows in _chunks(len(hidden), ctx.settings):
                here = _gradient(ctx, rows, maps.logits(rows), softmax, grads).to(hidden.dtype)
                for d_x, d_w, x, w in ((d_hidden, d_weight, hidden, maps.head), (d_h, d_b, h, maps.b)):
                    if d_x is not None and w is not None:
                        d_x[rows] = here @ w
                    if d_w is not None and x is not None:
                        d_w[: ctx.real] += here.t() @ x[rows]
        wanted = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(found, inputs, strict=True)
        ]
        return *wanted, None, None, None


class _Maps(NamedTuple):
    """What logits are computed from: hidden states and the head's rows, and those of an adapter, if there is one."""

    hidden: Tensor
    head: Tensor
    h: Tensor | None
    b: Tensor | None

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of some tokens, [rows, real]."""
        logits = self.hidden[rows] @ self.head.t()
        return logits if self.h is None or self.b is None else logits + self.h[rows] @ self.b.t()
