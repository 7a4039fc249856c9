"""Averaging: the one place where token losses become the loss of an optimizer step.

A step works on a mini-batch that is cut into ranks and micro-batches. Its loss is a mean over the whole mini-batch, so
each piece contributes a sum, divided by a denominator of the whole. Both halves are here:

1. Before the step, every rank counts its shard with :func:`step_totals` and the counts are added up over ranks, for
   example ``sum(all_gathered, StepTotals())``. The mask to count is the one left by the off-policy masks
   (``off_policy.effective_mask``), known from the mask and from old and rollout log-probs.
2. In the step, each micro-batch turns the totals into one weight a row (:func:`row_weights`), and contributes
   :func:`weighted_sum` of its policy loss, its KL and its entropy, all with the same mask and weights. The
   contributions of all micro-batches and ranks add up to the step's loss: gradients are sums, too, and nothing is
   averaged again.

``loss_reduction`` says which mean, with m the mask and L the loss of a token:

    token_mean               Σ m·L / Σ m
    sequence_mean            mean over sequences of (Σ m·L / Σ m)
    seq_mean_token_sum_norm  mean over sequences of (Σ m·L / max_seq_len)      (Dr. GRPO, arXiv:2503.20783)
    prompt_mean              mean over prompts of (Σ m·L / Σ m), over all responses to the prompt

Sequences and prompts without a single valid token are not counted: neither dummy rows, nor empty responses, nor what a
mask removed changes the mean of the others. A step without valid tokens has loss 0.

A scalar from a custom loss is the mean of its micro-batch; :func:`micro_batch_share` is its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import check_mask, keep_masked
from skyrl_megatron.errors import AlgorithmError

LOSS_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts of a shard of the mini-batch, added up to those of the optimizer step. Exact: whole numbers."""

    tokens: int = 0
    """Valid tokens."""
    rows: int = 0
    """Sequences with a valid token."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Valid tokens of each prompt that has any, by uid; only for ``prompt_mean``."""

    def __add__(self, other: StepTotals) -> StepTotals:
        prompts = dict(self.prompt_tokens)
        for uid, tokens in other.prompt_tokens.items():
            prompts[uid] = prompts.get(uid, 0) + tokens
        return StepTotals(self.tokens + other.tokens, self.rows + other.rows, prompts)


def step_totals(mask: Tensor, loss_reduction: str = "token_mean", uids: Sequence[str] | None = None) -> StepTotals:
    """Count one shard: any rows of the mini-batch with their mask [B, T], and for ``prompt_mean`` their uids.

    Raises AlgorithmError for a mask that holds more than 0 and 1, an unknown reduction, or missing uids.
    """
    check_loss_reduction(loss_reduction)
    check_mask("loss_mask", mask)
    per_row: list[int] = (mask > 0).sum(dim=1).tolist()
    prompts: dict[str, int] = {}
    if loss_reduction == "prompt_mean":
        for uid, tokens in zip(_uids_of(uids, len(per_row)), per_row, strict=True):
            if tokens:
                prompts[uid] = prompts.get(uid, 0) + tokens
    return StepTotals(sum(per_row), sum(1 for tokens in per_row if tokens), prompts)


def row_weights(
    mask: Tensor,
    totals: StepTotals,
    loss_reduction: str = "token_mean",
    *,
    max_seq_len: int | None = None,
    uids: Sequence[str] | None = None,
) -> Tensor:
    """Return [B] float64: the weight of each valid token of a row in the loss of the step; 0 for rows without one.

    ``mask`` [B, T] is that of the micro-batch, whole rows; ``totals`` are the step's. ``max_seq_len`` is needed for
    ``seq_mean_token_sum_norm``, ``uids`` for ``prompt_mean``. Raises AlgorithmError where they are missing.
    """
    check_loss_reduction(loss_reduction)
    lengths = (mask > 0).sum(dim=1).double()
    rows = max(totals.rows, 1)
    match loss_reduction:
        case "token_mean":
            per_token = torch.full_like(lengths, 1 / max(totals.tokens, 1))
        case "sequence_mean":
            per_token = 1 / (rows * lengths.clamp(min=1))
        case "seq_mean_token_sum_norm":
            if not max_seq_len:
                raise AlgorithmError("loss_reduction=seq_mean_token_sum_norm needs trainer.algorithm.max_seq_len")
            per_token = torch.full_like(lengths, 1 / (rows * max_seq_len))
        case _:
            tokens = [totals.prompt_tokens.get(uid, 1) for uid in _uids_of(uids, len(lengths))]
            per_token = 1 / (max(len(totals.prompt_tokens), 1) * lengths.new_tensor(tokens))
    return torch.where(lengths > 0, per_token, 0.0)


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Return a micro-batch's contribution, Σ over rows of weight · Σ over valid tokens of ``values`` [B, T]. Scalar.

    Differentiable in ``values``; masked entries, whatever they hold, contribute exactly 0 to value and gradient. The
    sum over rows is taken in float64, the result has the dtype of ``values``, float32 at least.
    """
    dtype = values.dtype if values.dtype == torch.float64 else torch.float32
    per_row = keep_masked(values, mask).sum(dim=1, dtype=dtype)
    return (per_row.double() * weights).sum().to(dtype)


def micro_batch_share(mask: Tensor, totals: StepTotals, loss_reduction: str = "token_mean") -> Tensor:
    """Return a micro-batch's share of the step, scalar float64: of tokens, or of sequences for means over rows.

    Shares of all micro-batches add up to 1. The weight of a scalar returned by a custom loss, and of metrics that are
    totals.
    """
    valid = mask > 0
    if loss_reduction in ("sequence_mean", "prompt_mean"):
        return valid.any(dim=1).sum().double() / max(totals.rows, 1)
    return valid.sum().double() / max(totals.tokens, 1)


def check_loss_reduction(loss_reduction: str) -> None:
    """Raise AlgorithmError for a name that is none of ``LOSS_REDUCTIONS``."""
    if loss_reduction not in LOSS_REDUCTIONS:
        raise AlgorithmError(
            f"trainer.algorithm.loss_reduction={loss_reduction!r}: choose one of {', '.join(LOSS_REDUCTIONS)}"
        )


def _uids_of(uids: Sequence[str] | None, rows: int) -> Sequence[str]:
    if uids is None or len(uids) != rows:
        raise AlgorithmError(
            f"loss_reduction=prompt_mean needs the uid of each of the {rows} rows, got"
            f" {'none' if uids is None else len(uids)}"
        )
    return uids
