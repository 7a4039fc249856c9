"""Log-probs, entropy and top-k of vocabulary-parallel logits.

Each rank reduces its columns to four numbers per token (``softmax.py``); two small all-reduces combine them. The
backward pass recomputes the softmax, so only the logits of size [P, V] are saved, and their gradient may overwrite
them. With hidden states as input (``trainer.fused_lm_head_logprob``) the logits are not saved either.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.runtime.softmax import Kernel, Support, TorchKernel


@dataclass(frozen=True, slots=True)
class SoftmaxSettings:
    """Settings of the softmax over the vocabulary."""

    vocab_size: int
    """Entries of the vocabulary without padding."""
    temperature: float = 1.0
    chunk_size: int = 1024
    """Tokens whose logits are in memory at once when they are computed from hidden states; 0: all. The backward pass
    keeps equally many logits: all tokens, some of the columns."""
    with_entropy: bool = False
    overwrite: bool = False
    """Whether the backward pass may overwrite the logits with their gradient. Nothing may read them afterwards."""


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    settings: SoftmaxSettings,
    support: Support | None = None,
    further: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target and, with ``with_entropy``, the entropy; both [P + x] float32, in nats.

    ``logits``: [P, V_padded / tp], this rank's columns; ``targets``: [P + x] int64 in [0, vocab_size). ``further``:
    [x] int64, the row of ``logits`` of each target after the first P; None: x is 0. Vocabulary padding has probability
    0. The result is equal on every rank of ``group``; each rank gets the gradient of its own columns. ``support``: the
    tokens over which each softmax is taken, including the target; None: the vocabulary.
    """
    every = logits, targets, group, settings, support, further
    logprobs, entropy = _FromLogits.apply(*every)  # type: ignore[no-untyped-call]
    return logprobs, entropy if settings.with_entropy else None


def fused_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    settings: SoftmaxSettings,
    low_rank: tuple[Tensor, Tensor] | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`logprobs_and_entropy` of the logits ``hidden @ weightᵀ``, computed one chunk at a time.

    The backward pass loops over blocks of columns. Each row of the weight gets its gradient from one product, in the
    weight's dtype; only the gradient of ``hidden`` is summed over blocks, in fp32.

    ``hidden``: [P, H], equal on every rank of ``group``; the gradient of each rank is a partial sum over the group.
    ``weight``: [V_padded / tp, H], this rank's rows. ``low_rank``: an adapter's (h [P, r], b [V_padded / tp, r]),
    which adds ``h @ bᵀ`` to the logits; h is replicated like ``hidden``.
    """
    h, b = low_rank or (None, None)
    every = hidden, weight, h, b, targets, group, settings, support
    logprobs, entropy = _FromHidden.apply(*every)  # type: ignore[no-untyped-call]
    return logprobs, entropy if settings.with_entropy else None


def kernel_for(logits: Tensor) -> Kernel:
    """Return the kernel for the device of ``logits`` [n, v]: Triton's on a GPU if it is installed, else torch's."""
    return (_triton() if logits.is_cuda else None) or TorchKernel


@functools.cache
def _triton() -> Kernel | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from skyrl_megatron.runtime import triton_softmax

    return triton_softmax


# ------------------------------------------------------------------ forward and backward pass over a rank's columns
@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's columns of the vocabulary, with the position of each target in them."""

    group: dist.ProcessGroup
    settings: SoftmaxSettings
    real: int
    """Columns that are not vocabulary padding."""
    targets: Tensor
    """[P] int64: the target's local column; −1 if another rank has it."""
    first: int
    support: Support | None

    @classmethod
    def of(
        cls, targets: Tensor, width: int, group: dist.ProcessGroup, settings: SoftmaxSettings, support: Support | None
    ) -> _Columns:
        first = group.rank() * width
        # padding of the vocabulary is at the end, so only the last ranks have columns that are not real
        real = max(0, min(width, settings.vocab_size - first))
        local = targets - first
        # −1, not a clamped column: another rank has the target, and this one must add nothing for it
        return cls(group, settings, real, torch.where((local >= 0) & (local < real), local, -1), first, support)

    def kept(self, rows: slice) -> Tensor | None:
        return None if self.support is None else self.support.kept(rows, self.first, self.real)

    def part(self, columns: slice) -> _Columns:
        """Return a block of these columns."""
        width = columns.stop - columns.start
        local = self.targets - columns.start
        targets = torch.where((local >= 0) & (local < width), local, -1)
        return replace(self, real=width, targets=targets, first=self.first + columns.start)

    def parts(self) -> list[slice]:
        """Split the columns into blocks; a block of all tokens has as many logits as a chunk of tokens."""
        tokens = max(len(self.targets), 1)
        size = max(-(-self.real * min(self.settings.chunk_size or tokens, tokens) // tokens), 1)
        # of the real columns: equal memory for chunks of tokens (forward) and blocks of columns (backward)
        return [slice(start, min(start + size, self.real)) for start in range(0, self.real, size)]

    def chunks(self, tokens: int | None = None) -> list[slice]:
        tokens = len(self.targets) if tokens is None else tokens
        size = self.settings.chunk_size or max(tokens, 1)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def forward(self, logits_of: Callable[[slice], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probs [P], entropies [P], input of :meth:`coefficients`), fp32 or of fp64 logits fp64.

        ``logits_of``: rows → [rows, real] in ``dtype``.

        With s = (logit − peak) / temperature: log p = s_target − log Σ exp(s);  H = log Σ exp(s) − Σ p s.
        """
        settings = self.settings
        # one tensor for all four numbers, so that two collectives per micro-batch join them
        sums = torch.promote_types(dtype, torch.float32)
        statistics = torch.empty(4, len(self.targets), dtype=sums, device=self.targets.device)
        exact = torch.empty_like(statistics[0]) if exact_ops.active() else None
        for rows in self.chunks():
            logits = logits_of(rows)
            if exact is not None:
                # replaces only the log-probs: the statistics are still needed for the gradient and the entropy
                exact[rows] = self._exact_logprobs(logits, rows)
            statistics[:, rows] = kernel_for(logits).statistics(
                logits,
                self.targets[rows],
                self.kept(rows),
                temperature=settings.temperature,
                with_entropy=settings.with_entropy,
            )
        peak, others, moment, target = _joined(statistics, self.group, settings.temperature)
        s = (target - peak) / settings.temperature
        weight = s.exp()
        total = others + weight
        mean = (moment + weight * s) / total
        # p near 1: 1 − p is the sum of the others, which a logarithm of the total would round away
        likely = s > -1.0  # log1p keeps the precision of log-probs near 0
        logprobs = torch.where(likely, -(others / weight).log1p(), s - total.log()) if exact is None else exact
        return logprobs, total.log() - mean, torch.stack([peak, others, mean, s])

    def _exact_logprobs(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the targets' log-probs as the engine computes them (``trainer.exact_rollouts``)."""
        z = logits / torch.tensor(self.settings.temperature)
        if (kept := self.kept(rows)) is not None:
            z = z.masked_fill(~kept, -torch.inf)
        targets = self.targets[rows]
        if self.group.size() > 1:
            z, targets = self._gathered(z, targets)
        return exact_ops.log_softmax(z).gather(1, targets[:, None]).squeeze(1)

    def _gathered(self, z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of all ranks, [rows, vocab_size], and the targets among them."""
        size, rank, vocabulary = self.group.size(), self.group.rank(), self.settings.vocab_size
        most = min(self.first // rank, vocabulary) if rank else self.real
        pieces = [z.new_empty(len(z), most) for _ in range(size)]
        # ranks with padding have fewer real columns; all_gather needs equal sizes
        dist.all_gather(pieces, F.pad(z, (0, most - self.real)), group=self.group)
        all_columns = torch.cat(pieces, 1)[:, :vocabulary]
        targets = torch.where(targets >= 0, targets + self.first, -1)
        dist.all_reduce(targets, op=dist.ReduceOp.MAX, group=self.group)
        return all_columns, targets

    def coefficients(self, softmax: Tensor, d_logprobs: Tensor, d_entropy: Tensor) -> Tensor:
        """Return the coefficients of :meth:`softmax.Kernel.gradient`, [4, P] fp32.

        ∂log p/∂logit_j = (1[j = target] − p_j) / temperature;  ∂H/∂logit_j = −p_j (s_j − Σ p s) / temperature.
        """
        peak, others, mean, s = softmax
        total = others + s.exp()
        # others / total = 1 − p without cancellation for p near 1
        a, b, at_target = -d_logprobs, torch.zeros_like(d_logprobs), d_logprobs * others
        if self.settings.with_entropy:
            a, b = a + d_entropy * mean, -d_entropy
            at_target = at_target - d_entropy * s.exp() * (s - mean)
        return torch.stack([peak, *(term / (total * self.settings.temperature) for term in (a, b, at_target))])

    def backward(self, logits: Tensor, rows: slice, coefficients: Tensor, out: Tensor) -> None:
        """Write the gradient of ``logits`` [rows, real] to ``out``, which may be the same tensor."""
        kernel_for(logits).gradient(
            logits,
            self.targets[rows],
            self.kept(rows),
            coefficients[:, rows],
            out,
            temperature=self.settings.temperature,
            with_entropy=self.settings.with_entropy,
        )


def _joined(statistics: Tensor, group: dist.ProcessGroup, temperature: float) -> Tensor:
    """Combine the statistics of all ranks' columns, in place."""
    if group.size() == 1:
        return statistics
    peak = statistics[0].clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    lower = (statistics[0] - peak) / temperature
    factor = lower.exp()
    # where the factor underflows to 0, lower may be −∞, and 0 · −∞ is NaN
    statistics[2] = factor * (statistics[2] + torch.where(factor > 0, lower * statistics[1], 0.0))
    # in this order: the moment needs the unscaled sum
    statistics[1] *= factor
    dist.all_reduce(statistics[1:], group=group)
    statistics[0] = peak
    return statistics


# ------------------------------------------------------------------ from logits
class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        settings: SoftmaxSettings,
        support: Support | None,
        further: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        columns = _Columns.of(targets, logits.shape[-1], group, settings, support)
        logprobs, entropy, softmax = columns.forward(
            lambda rows: _rows(logits, rows, columns.real, further), logits.dtype
        )
        ctx.save_for_backward(logits, softmax, further)
        ctx.columns = columns
        return _outputs(ctx, logprobs, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns: _Columns = ctx.columns
        logits, softmax, further = ctx.saved_tensors
        coefficients = columns.coefficients(softmax, *grads)
        # first: they need the logits, and become the gradients of their own copies
        extra = None
        if further is not None:
            extra = logits[further, : columns.real]
            columns.backward(extra, slice(len(logits), len(columns.targets)), coefficients, extra)
        # the logits are the largest tensor of a micro-batch: their gradient takes their memory
        grad = logits.detach() if columns.settings.overwrite else torch.empty_like(logits)
        for rows in columns.chunks(len(logits)):
            columns.backward(logits[rows, : columns.real], rows, coefficients, grad[rows, : columns.real])
        # padding has probability 0 and gets no gradient; empty_like leaves garbage there
        grad[:, columns.real :] = 0.0
        if extra is not None:
            grad[:, : columns.real].index_add_(0, further, extra)
        return grad, None, None, None, None, None


def _rows(logits: Tensor, rows: slice, real: int, further: Tensor | None) -> Tensor:
    """Return ``logits`` [P, real] of some targets, of which those after P are of the rows ``further`` [x]."""
    if rows.stop <= len(logits) or further is None:
        return logits[rows, :real]
    index = torch.arange(min(rows.start, len(logits)), len(logits), device=logits.device)
    after = further[max(rows.start - len(logits), 0) : rows.stop - len(logits)]
    return logits[torch.cat([index, after]), :real]


def _outputs(ctx: Any, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    if not ctx.columns.settings.with_entropy:
        ctx.mark_non_differentiable(entropy)
    return logprobs, entropy


# ------------------------------------------------------------------ from hidden states
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
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        columns = _Columns.of(targets, len(weight), group, settings, support)
        maps = _Maps(hidden, weight[: columns.real], h, None if b is None else b[: columns.real])
        logprobs, entropy, softmax = columns.forward(maps.logits, hidden.dtype)
        ctx.save_for_backward(hidden, weight, h, b, softmax)
        ctx.columns = columns
        return _outputs(ctx, logprobs, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns: _Columns = ctx.columns
        hidden, weight, h, b, softmax = ctx.saved_tensors
        inputs: tuple[Tensor | None, ...] = (hidden, weight, h, b)
        # summed over blocks of columns: in bfloat16 each addition would round
        sums = torch.promote_types(hidden.dtype, torch.float32)
        kinds = (sums, weight.dtype, sums, weight.dtype)
        gradients = [
            torch.zeros(tensor.shape, dtype=kind, device=tensor.device) if tensor is not None and needed else None
            for tensor, kind, needed in zip(inputs, kinds, ctx.needs_input_grad, strict=False)
        ]
        coefficients = columns.coefficients(softmax, *grads)
        every = slice(0, len(hidden))
        # by columns: a row of the weight then gets its gradient from one product, with no sum over chunks of
        # tokens
        for part in columns.parts():
            maps = _Maps(hidden, weight[part], h, None if b is None else b[part])
            logits = maps.logits(every)
            # in place: each block's logits are made again anyway
            columns.part(part).backward(logits, every, coefficients, logits)
            maps.backward(logits, part, gradients)
            del logits  # before the next part's
        wanted = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(gradients, inputs, strict=True)
        ]
        return *wanted, None, None, None, None


class _Maps(NamedTuple):
    """The factors of the logits: hidden states and rows of the head, and those of an adapter, if there is one."""

    hidden: Tensor
    head: Tensor
    h: Tensor | None
    b: Tensor | None

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of some tokens, [rows, real]."""
        hidden = self.hidden[rows]
        logits = exact_ops.product(hidden, self.head) if exact_ops.active() else hidden @ self.head.t()
        return logits if self.h is None or self.b is None else logits.addmm_(self.h[rows], self.b.t())

    def backward(self, grad: Tensor, part: slice, gradients: list[Tensor | None]) -> None:
        """Add to ``gradients``, those of the four factors, the contribution of the columns ``part``.

        ``grad``: [P, columns], the gradient of their logits.
        """
        d_hidden, d_head, d_h, d_b = gradients
        for d_x, d_w, x, w in ((d_hidden, d_head, self.hidden, self.head), (d_h, d_b, self.h, self.b)):
            if d_x is not None and w is not None:
                _add_product(d_x, grad, w)
            if d_w is not None and x is not None:
                torch.mm(grad.t(), x, out=d_w[part])


def _add_product(total: Tensor, grad: Tensor, weight: Tensor) -> None:
    """Add ``grad @ weight`` to ``total``, which may have a wider dtype."""
    if grad.dtype == total.dtype:
        total.addmm_(grad, weight)
    else:
        # torch.addmm needs one dtype; the sum is fp32 while the product is the weight's
        total += grad @ weight


def top_logprobs(logits: Tensor, k: int, group: dist.ProcessGroup, settings: SoftmaxSettings) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most likely tokens, most likely first: (log-probs float32 in nats, ids int64), [P, k] each.

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
        best_logits = torch.full((len(z), k), -torch.inf, dtype=torch.float32, device=z.device)
        named = torch.zeros(len(z), k, dtype=torch.int64, device=z.device)
        # unfilled places have −∞ and are never chosen, as long as k is at most the vocabulary
        best_logits[:, :here], named[:, :here] = best.values, best.indices + first
        if group.size() > 1:
            best_logits, named = (_side_by_side(part, group) for part in (best_logits, named))
        chosen = best_logits.topk(k, dim=-1)
        # only the chosen are normalised: a log_softmax of all columns would be another [rows, V]
        values[rows] = chosen.values - _log_z(z, group)[:, None]
        ids[rows] = named.gather(1, chosen.indices)
    return values, ids


def logprobs_of(logits: Tensor, ids: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings) -> Tensor:
    """Return the log-prob of each of ``ids`` [P, k] int64 at its position: [P, k] float32, nats, differentiable.

    ``logits`` as in :func:`top_logprobs`; each rank gets the gradient of its own columns.
    """
    found: Tensor = _LogprobsOfIds.apply(logits, ids, group, settings)  # type: ignore[no-untyped-call]
    return found


class _LogprobsOfIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, group: dist.ProcessGroup, settings: SoftmaxSettings) -> Tensor:
        first, real = _columns(logits, group, settings)
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        log_z = torch.empty(len(ids), dtype=torch.float32, device=logits.device)
        for rows in _chunks(len(logits), settings):
            z = logits[rows, :real].float() / settings.temperature
            local, here = _local(ids[rows], first, real)
            # 0 where another rank has the token: the sum over ranks is then the one logit
            part = torch.where(here, z.gather(1, local), 0.0) if real else torch.zeros_like(logprobs[rows])
            if group.size() > 1:
                dist.all_reduce(part, group=group)
            log_z[rows] = _log_z(z, group)
            logprobs[rows] = part - log_z[rows, None]
        ctx.save_for_backward(logits, ids, log_z)
        ctx.columns, ctx.settings = (first, real), settings
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits, ids, log_z), (first, real), settings = ctx.saved_tensors, ctx.columns, ctx.settings
        out = torch.zeros_like(logits)
        for rows in _chunks(len(logits), settings):
            z = logits[rows, :real].float() / settings.temperature
            local, here = _local(ids[rows], first, real)
            grad_logprobs = grads[0][rows].float()
            grad = (z - log_z[rows, None]).exp_().mul_(-grad_logprobs.sum(-1, keepdim=True))
            if real:
                grad.scatter_add_(1, local, torch.where(here, grad_logprobs, 0.0))
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
    """Return the logarithm of the partition function, [rows]. ``z``: this rank's columns, possibly none."""
    # a rank with padding alone has no columns to take a maximum of
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
