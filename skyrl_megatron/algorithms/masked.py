"""Masked means and variances, and checks of input: shapes, dtypes, masks of 0 and 1, finite values.

Masks are [B, T] (or any shape), 1 where a token is valid.

What stands outside a mask has weight 0, but must be finite; :func:`keep_masked` clears what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.types import TrainingBatch

BLOCK = 1 << 18


def keep_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Set ``values`` to exactly 0 where ``mask`` is 0; NaN there does not survive, as it would in a product."""
    return values if mask is None else torch.where(mask > 0, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, map: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Return Σ map(values)·mask, scalar. In blocks: to allocate a second such tensor costs more than the sum."""
    blocks = zip(torch.split(values.flatten(), BLOCK), torch.split(mask.flatten(), BLOCK), strict=True)
    return torch.stack([(map(part) * valid).sum() for part, valid in blocks]).sum()


def masked_mean(values: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean over the valid entries, of everything or along ``dim``; 0 where nothing is valid."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    if dim is None:
        return masked_sum(values, mask) / mask.sum().clamp(min=1)
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_token_mean(loss: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of a per-token loss [B, T] over its valid tokens: the scalar that a custom loss may return.

    For losses that wrap a built-in one, whose result is per token.
    """
    return masked_mean(loss, mask)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance over the valid entries; ``unbiased`` divides by their number minus one.

    Raises AlgorithmError (a ValueError) when there are fewer than two valid entries for an unbiased variance.
    """
    count = mask.sum()
    if unbiased and count < 2:
        raise AlgorithmError(f"the variance needs at least 2 valid tokens, the mask has {int(count)}")
    mean = masked_mean(values, mask)
    squares = masked_sum(values, mask, lambda part: (part - mean).square())
    return squares / (count - 1 if unbiased else count.clamp(min=1))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale ``values`` to variance 1 over the valid entries, and to mean 0 when ``shift_mean``.

    Entries outside the mask go through the same map: ignore them. Raises as :func:`masked_var` does.
    """
    mean = masked_mean(values, mask)
    scale = torch.rsqrt(masked_var(values, mask) + 1e-8)
    return (values - mean) * scale if shift_mean else (values - mean) * scale + mean


BLOCK_SIZE = 1 << 20


def check_token_tensors(shape_of: str, /, **tensors: Tensor | None) -> None:
    """Check that every tensor is [B, T] with shape and device of ``tensors[shape_of]``, and floating unless a mask.

    A name that ends in ``mask`` may be bool or integer too. Raises AlgorithmError with the names and both shapes.
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
            raise AlgorithmError(f"{name} has dtype {tensor.dtype}: a floating dtype is needed")
        if tensor.device != reference.device:
            raise AlgorithmError(f"{name} is on {tensor.device}, {shape_of} on {reference.device}: move one of them")


def check_mask(name: str, mask: Tensor) -> None:
    """Check that a mask holds 0 and 1 only. Raises AlgorithmError with the first other value and its place."""
    if mask.dtype == torch.bool or not mask.numel():
        return
    # Only 0, 1 and infinity are their own squares. In blocks, so that no second mask has to be written to memory.
    if mask.max() <= 1 and all(torch.equal(part * part, part) for part in torch.split(mask.flatten(), BLOCK_SIZE)):
        return
    row, token = ((mask != 0) & (mask != 1)).nonzero()[0].tolist()
    raise AlgorithmError(
        f"{name} must hold 0 and 1 only, found {mask[row, token].item():g} in row {row}, token {token}"
    )


def finite_rows(
    name: str,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    nonfinite: str = "error",
    uids: Sequence[str] | np.ndarray | None = None,
) -> Tensor:
    """Return [B] bool: the rows of ``values`` ([B] or [B, T]) whose entries are all finite where ``mask`` is 1.

    ``nonfinite`` is ``algorithm.nonfinite``: ``error`` raises AlgorithmError naming the first bad row, its uid, token
    and value; ``skip`` returns the rows to keep, for the caller to mask and to count (``(~rows).sum()``).
    """
    considered = keep_masked(values.detach(), mask)
    rows = values.shape[0]
    # A finite sum proves that every entry is finite; one pass over memory instead of three.
    if bool(considered.sum().isfinite()):
        return torch.ones(rows, dtype=torch.bool, device=values.device)
    finite = considered.isfinite()
    keep = finite.reshape(rows, -1).all(dim=1)
    if nonfinite == "skip" or bool(keep.all()):
        return keep
    place = (~finite).nonzero()[0].tolist()
    row, token = place[0], place[1] if len(place) > 1 else None
    whose = "" if uids is None else f" (uid {str(uids[row])!r})"
    raise AlgorithmError(
        f"{name} of row {row}{whose} is {considered[tuple(place)].item()}"
        + ("" if token is None else f" at token {token}")
        + f"; {int((~keep).sum())} of {rows} rows are not finite. Fix what computes them, or set"
        " trainer.algorithm.nonfinite=skip to leave such samples out and count them"
    )


def finite_samples(batch: TrainingBatch, nonfinite: str = "error") -> Tensor:
    """Return [B] bool: the rows whose rewards, values and log-probs are finite, log-probs where trained on.

    Raises, or returns the rows to keep, as :func:`finite_rows` does. Rows to skip leave the step by
    ``batch.loss_mask *= keep[:, None]``, and before advantages are computed, so that they affect no group.
    """
    keep = torch.ones(len(batch), dtype=torch.bool, device=batch.loss_mask.device)
    for name in ("rewards", "values", "rollout_logprobs", "old_logprobs", "ref_logprobs"):
        values = getattr(batch, name)
        if values is not None:
            mask = batch.loss_mask if name.endswith("logprobs") else None
            keep &= finite_rows(name, values, mask, nonfinite=nonfinite, uids=batch.uids or None)
    return keep
