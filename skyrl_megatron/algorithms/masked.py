"""Masked means and variances, and input checks: shapes, dtypes, mask values, finite values.

Masks are [B, T] (or any shape) and 1 where a token is valid. Values outside a mask have weight 0, but they must be
finite: :func:`keep_masked` replaces them with 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.data.batch import refuse_mask
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.types import RowSpans, TrainingBatch

SUM_BLOCK = 1 << 18
"""Elements that a masked sum multiplies at once."""


def keep_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Set ``values`` […] to exactly 0 where ``mask`` […] is 0, also where they are NaN (a product would keep NaN)."""
    return values if mask is None else torch.where(mask > 0, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, map: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Return Σ map(values)·mask as a scalar. Works in blocks, as allocating a second large tensor costs more time."""
    blocks = zip(torch.split(values.flatten(), SUM_BLOCK), torch.split(mask.flatten(), SUM_BLOCK), strict=True)
    return torch.stack([(map(part) * valid).sum() for part, valid in blocks]).sum()


def masked_mean(values: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean of ``values`` […] over all entries that are valid in ``mask`` […], a scalar, or over those along
    ``dim``, […] without it; 0 where no entry is valid."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    if dim is None:
        return masked_sum(values, mask) / mask.sum().clamp(min=1)
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_token_mean(loss: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of a per-token loss [B, T] over its valid tokens.

    A custom loss that wraps a built-in one can use it to return a scalar.
    """
    return masked_mean(loss, mask)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of ``values`` […] over the entries that are valid in ``mask`` […], a scalar; ``unbiased``
    divides by their number minus one.

    Raises AlgorithmError (a ValueError) for an unbiased variance of fewer than two valid entries.
    """
    count = mask.sum()
    if unbiased and count < 2:
        raise AlgorithmError(
            f"the variance needs at least 2 valid tokens, the mask has {int(count)}: take a larger batch, or "
            "unbiased=False"
        )
    mean = masked_mean(values, mask)
    # about the mean, in a second pass: Σx² − n·mean² would cancel for values far from 0
    squares = masked_sum(values, mask, lambda part: (part - mean).square())
    return squares / (count - 1 if unbiased else count.clamp(min=1))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale ``values`` […] to variance 1 over the entries that are valid in ``mask`` […], and to mean 0 when
    ``shift_mean``.

    Entries outside the mask are scaled too: ignore them. Raises the errors of :func:`masked_var`.
    """
    mean = masked_mean(values, mask)
    scale = torch.rsqrt(masked_var(values, mask) + 1e-8)
    return (values - mean) * scale if shift_mean else (values - mean) * scale + mean


CHECK_BLOCK = 1 << 20
"""Elements of a mask that are checked at once."""


def check_token_tensors(shape_of: str, /, **tensors: Tensor | None) -> None:
    """Check that every tensor is [B, T], floating-point, and has the shape and device of ``tensors[shape_of]``.

    Tensors whose name ends in ``mask`` may be bool or integer. Raises AlgorithmError with the names and both shapes.
    """
    reference = tensors[shape_of]
    assert reference is not None
    if reference.ndim != 2:
        raise AlgorithmError(f"{shape_of} must be [B, T], got shape {tuple(reference.shape)}")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != reference.shape:
            raise AlgorithmError(
                f"{name} has shape {tuple(tensor.shape)}, {shape_of} has {tuple(reference.shape)}: they must be equal"
            )
        if not name.endswith("mask") and not tensor.is_floating_point():
            raise AlgorithmError(f"{name} has dtype {tensor.dtype}: convert it to a floating dtype")
        if tensor.device != reference.device:
            raise AlgorithmError(f"{name} is on {tensor.device}, {shape_of} on {reference.device}: move one of them")


def check_mask(name: str, mask: Tensor) -> None:
    """Check that a mask [B, T] holds only 0 and 1. Raises AlgorithmError with the first other value and its
    position."""
    if mask.dtype == torch.bool or not mask.numel():
        return
    # Only 0, 1 and infinity are their own squares. Blocks avoid a second mask in memory.
    if mask.max() <= 1 and all(torch.equal(part * part, part) for part in torch.split(mask.flatten(), CHECK_BLOCK)):
        return
    row, token = ((mask != 0) & (mask != 1)).nonzero()[0].tolist()
    refuse_mask(name, mask[row, token].item(), row, token)


def finite_rows(
    name: str,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    nonfinite: str = "error",
    uids: Sequence[str] | np.ndarray | None = None,
    of: RowSpans | None = None,
) -> Tensor:
    """Return [B] bool: the rows of ``values`` ([B] or [B, T]) whose entries are all finite where ``mask`` is 1.
    ``of``: the rows of flat values [R].

    ``nonfinite`` is ``algorithm.nonfinite``. With ``error`` a non-finite row raises AlgorithmError with its number,
    uid, token and value. With ``skip`` the caller masks the other rows and counts them (``(~rows).sum()``).
    """
    # outside of the mask anything is allowed: padding of log-probs may be infinite
    considered = keep_masked(values.detach(), mask)
    rows = values.shape[0] if of is None else len(of)
    # A finite sum proves that every entry is finite, in one pass over memory instead of three.
    if bool(considered.sum().isfinite()):
        return torch.ones(rows, dtype=torch.bool, device=values.device)
    finite = considered.isfinite()
    keep = finite.reshape(rows, -1).all(dim=1) if of is None else ~of.any(~finite)
    # the sum alone may overflow while every entry is finite
    if nonfinite == "skip" or bool(keep.all()):
        return keep
    position = (~finite).nonzero()[0].tolist()
    row, token = position[0], position[1] if len(position) > 1 else None
    if of is not None:
        row, token = of.row_of(row)
    whose = "" if uids is None else f" (uid {str(uids[row])!r})"
    raise AlgorithmError(
        f"{name} of row {row}{whose} is {considered[tuple(position)].item()}"
        + ("" if token is None else f" at token {token}")
        + f"; {int((~keep).sum())} of {rows} rows are not finite. Fix what computes them, or set"
        " trainer.algorithm.nonfinite=skip to leave such samples out and count them"
    )


def finite_samples(batch: TrainingBatch, nonfinite: str = "error") -> Tensor:
    """Return [B] bool: the rows whose rewards, values and log-probs are finite. Log-probs count where trained on.

    ``nonfinite`` works as in :func:`finite_rows`. To skip the other rows, mask them before advantages are computed, so
    that they do not affect their group.
    """
    keep, rows = torch.ones(len(batch), dtype=torch.bool), batch.responses
    for name in ("rewards", "values", "rollout_logprobs", "old_logprobs", "ref_logprobs"):
        values = getattr(batch, name)
        if values is not None:
            # rewards and values at every position: rewards are summed over all of them
            mask = batch.loss_mask if name.endswith("logprobs") else None
            keep &= finite_rows(name, values, mask, nonfinite=nonfinite, uids=batch.uids or None, of=rows)
    return keep


SCANNED_TOKENS = 32
"""Tokens of a row that one matrix product sums."""


def discounted_suffix_sum(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``y_t = Σ_{s≥t} factor^(s-t) · x_s`` for x [B, T] and 0 ≤ factor ≤ 1, as a new tensor [B, T].

    ``factor`` is a number, or [B] float64 with one number per row. One matrix product computes the sums within blocks
    of tokens, then the same runs over the sums of the blocks: log(T) products.
    """
    rows, length = x.shape
    size = min(SCANNED_TOKENS, length)
    if isinstance(factor, Tensor):
        factor = factor.view(-1, 1, 1)
    # in float64 and rounded once: the powers of a factor near 1 would otherwise collect 32 rounding errors
    steps = torch.arange(size, device=x.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]  # from the token of the column to the later token of the row
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0).to(x.dtype)
    # on the left, so that every block ends where the sums of the next begin
    padding = -length % size
    padded = torch.nn.functional.pad(x, (padding, 0)) if padding else x
    blocks = padded.view(rows, -1, size)
    # with one factor the blocks of all rows are one matrix, and one product
    within = blocks @ powers if powers.dim() == 3 else (blocks.reshape(-1, size) @ powers).view(blocks.shape)
    if within.shape[1] > 1:
        block_factor = factor**size
        totals = discounted_suffix_sum(
            within[:, :, 0], block_factor.flatten() if isinstance(block_factor, Tensor) else block_factor
        )
        reach = (factor ** (size - steps)).to(x.dtype)  # from the first token of the next block
        within[:, :-1].addcmul_(totals[:, 1:, None], reach)
    return within.reshape(rows, -1)[:, padding:]
