"""Checks of input where it enters: shapes and dtypes, masks of 0 and 1, finite values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.types import TrainingBatch

BLOCK = 1 << 20


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
    if mask.max() <= 1 and all(torch.equal(part * part, part) for part in torch.split(mask.flatten(), BLOCK)):
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
