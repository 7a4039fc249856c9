"""Loss reduction: how token losses become the loss of an optimizer step.

The loss of a step is a mean over its whole mini-batch, which is split over ranks and micro-batches. Each micro-batch
therefore contributes a sum, divided by a denominator of the whole mini-batch:

1. Before the step, every rank counts its shard with :func:`step_totals`. The counts are added up over ranks, for
   example ``sum(all_gathered, StepTotals())``. The mask to count is ``off_policy.effective_mask``.
2. In the step, each micro-batch turns the totals into one weight per row (:func:`row_weights`). It contributes
   :func:`weighted_sum` of its policy loss, its KL and its entropy, all with the same mask and weights. The
   contributions of all micro-batches and ranks add up to the loss of the step. Gradients are summed as well, and
   nothing is averaged afterwards.

``loss_reduction`` selects the mean (m is the mask, L the loss of a token):

    token_mean               Σ m·L / Σ m
    sequence_mean            mean over sequences of (Σ m·L / Σ m)
    seq_mean_token_sum_norm  mean over sequences of (Σ m·L / max_seq_len)      (Dr. GRPO, arXiv:2503.20783)
    prompt_mean              mean over prompts of (Σ m·L / Σ m), over all responses to the prompt

Sequences and prompts without a valid token do not count, so dummy rows, empty responses and fully masked rows do not
change the mean of the others. A step without valid tokens has loss 0.

A scalar that a custom loss returns is the mean of its micro-batch. Its weight is :func:`micro_batch_share`.
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
    """Counts of a shard of the mini-batch; the sum over all shards is that of the optimizer step."""

    tokens: int = 0
    """Valid tokens."""
    rows: int = 0
    """Sequences with a valid token."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Valid tokens of each prompt that has any, by uid; only for ``prompt_mean``."""
    observed: int = 0
    """Tokens of observations, with ``observation_loss_coef``."""

    def __add__(self, other: StepTotals) -> StepTotals:
        prompts = dict(self.prompt_tokens)
        for uid, tokens in other.prompt_tokens.items():
            prompts[uid] = prompts.get(uid, 0) + tokens
        observed = self.observed + other.observed
        return StepTotals(self.tokens + other.tokens, self.rows + other.rows, prompts, observed)


def step_totals(mask: Tensor, loss_reduction: str = "token_mean", uids: Sequence[str] | None = None) -> StepTotals:
    """Count one shard: rows of the mini-batch with their mask [B, T], and for ``prompt_mean`` their uids.

    Raises AlgorithmError for a mask with values other than 0 and 1, an unknown reduction, or missing uids.
    """
    check_loss_reduction(loss_reduction)
    check_mask("loss_mask", mask)
    # one copy to the host: reading the rows one by one would wait for the device each time
    per_row: list[int] = (mask > 0).sum(dim=1).tolist()
    prompts: dict[str, int] = {}
    if loss_reduction == "prompt_mean":
        for uid, tokens in zip(_uids_of(uids, len(per_row)), per_row, strict=True):
            if tokens:
                prompts[uid] = prompts.get(uid, 0) + tokens
    return StepTotals(sum(per_row), sum(1 for tokens in per_row if tokens), prompt_tokens=prompts)


def row_weights(
    mask: Tensor,
    totals: StepTotals,
    loss_reduction: str = "token_mean",
    *,
    max_seq_len: int | None = None,
    uids: Sequence[str] | None = None,
) -> Tensor:
    """Return [B] float64: the weight in the step's loss of each valid token of a row; 0 for rows without valid tokens.

    ``mask`` [B, T] belongs to the micro-batch, ``totals`` to the step. ``seq_mean_token_sum_norm`` requires
    ``max_seq_len``, ``prompt_mean`` requires ``uids``. Raises AlgorithmError if the required argument is missing.
    """
    check_loss_reduction(loss_reduction)
    lengths = (mask > 0).sum(dim=1).double()
    # a step without a valid token has loss 0, not 0/0
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
            # a prompt without a valid token is not in the totals; its rows get weight 0 below
            tokens = [totals.prompt_tokens.get(uid, 1) for uid in _uids_of(uids, len(lengths))]
            per_token = 1 / (max(len(totals.prompt_tokens), 1) * lengths.new_tensor(tokens))
    return torch.where(lengths > 0, per_token, 0.0)


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Return the contribution of a micro-batch as a scalar: Σ over rows of weight · Σ over valid tokens of ``values``.

    ``values`` is [B, T]; the result is differentiable in it. Masked entries, also NaN, contribute exactly 0 to value
    and gradient. The sum over rows is taken in float64. The result is float64 for float64 ``values``, else float32.
    """
    dtype = values.dtype if values.dtype == torch.float64 else torch.float32
    # rows in fp32 even for bfloat16 losses, whose sums would be rounded to 8 bits
    per_row = keep_masked(values, mask).sum(dim=1, dtype=dtype)
    # weights are 1 / tokens: summed in float64, the loss is the same however rows are split over micro-batches
    return (per_row.double() * weights).sum().to(dtype)


def micro_batch_share(mask: Tensor, totals: StepTotals, loss_reduction: str = "token_mean") -> Tensor:
    """Return a micro-batch's share of the step's tokens, or of its sequences for means over rows. Scalar float64.

    The shares of all micro-batches add up to 1. They weight the scalar of a custom loss, and metrics that are totals.
    """
    valid = mask > 0
    if loss_reduction in ("sequence_mean", "prompt_mean"):
        return valid.any(dim=1).sum().double() / max(totals.rows, 1)
    return valid.sum().double() / max(totals.tokens, 1)


def check_loss_reduction(loss_reduction: str) -> None:
    """Raise AlgorithmError for a name that is not in ``LOSS_REDUCTIONS``."""
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
