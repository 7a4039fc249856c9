"""How far the tokens of a batch lag behind the policy, span by span, and what that does to their probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_megatron.trainer.stream.records import Spans
from skyrl_megatron.types import TrainingBatch


def token_lags(spans: Spans, lengths: Sequence[int], version: int, width: int) -> Tensor:
    """Return [B, T] int32, right-aligned: training version minus that of the weights that sampled each token.

    It is -1 on tokens that were not sampled, or by a version without a number. ``lengths``: response tokens of each
    row; ``width``: T.
    """
    lags = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for row, (found, length) in enumerate(zip(spans, lengths, strict=True)):
        for name, first, end in found:
            if name.isdecimal():
                start = width - length
                lags[row, start + first : start + end] = version - int(name)
    return lags


def lag_metrics(batch: TrainingBatch, lags: Tensor, bound: int) -> dict[str, float]:
    """Return, over the tokens that are trained on, ``async/…``: ``token_lag_mean`` and ``token_lag_<k>`` (share of the
    tokens that are k steps old), ``logprob_diff_lag_<k>`` (nats: their mean |log-prob before the update − of the
    engine|, where both are known), and ``mixed_rows`` (share of the rows that several versions sampled)."""
    trained = (batch.loss_mask > 0) & (lags >= 0)
    if not trained.any():
        return {}
    least = torch.where(trained, lags, lags.max() + 1).amin(dim=1)
    most = torch.where(trained, lags, -1).amax(dim=1)
    rows = most >= 0
    found = {
        "async/token_lag_mean": lags[trained].double().mean().item(),
        "async/mixed_rows": (least < most)[rows].double().mean().item(),
    }
    gap = None
    if batch.old_logprobs is not None and batch.rollout_logprobs is not None:
        gap = (batch.old_logprobs - batch.rollout_logprobs).abs().double()
    for lag in range(bound + 1):
        here = trained & (lags == lag)
        found[f"async/token_lag_{lag}"] = (here.sum() / trained.sum()).item()
        if gap is not None and here.any():
            found[f"async/logprob_diff_lag_{lag}"] = gap[here].mean().item()
    return found
