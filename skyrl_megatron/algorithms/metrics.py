"""Metrics that reduce exactly over micro-batches and ranks, however a batch is split.

A metric has one of two types:

* :class:`Mean`, a sum and a weight (mostly a token count), both scalar float64 tensors. The pairs of two parts add up
  to the pair of the whole. A total, such as the loss of the step, is a pair too: the part's share of the value and its
  share of the step. The shares add up to the value and to 1.
* a scalar tensor, whose name ends in ``_min`` or ``_max``.

Two means give a standard deviation: ``x_mean`` and ``x_square_mean`` become ``x_mean`` and ``x_std``.

Pass@k and majority@k of an evaluation are exact means over all choices of k of the responses to a prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked


class Mean(NamedTuple):
    """Sum and weight (count) of a mean, scalar float64 tensors."""

    sum: Tensor
    weight: Tensor


type ReducibleMetrics = dict[str, Mean | Tensor]
"""Metrics by name, before :func:`metric_values` turns them into numbers."""


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of ``values`` […] (bool or floating) over the entries where ``mask`` […], of the same shape, is
    1."""
    # float64: float32 counts tokens exactly only up to 2²⁴
    kept = keep_masked(values.detach().double(), mask)
    return Mean(kept.sum(), (mask > 0).sum().double())


def moments(name: str, values: Tensor, mask: Tensor) -> ReducibleMetrics:
    """Return ``{name}_{mean,square_mean,min,max}`` of ``values`` […] over the entries where ``mask`` […] is 1."""
    values, valid = values.detach().double(), mask > 0
    return {
        f"{name}_mean": token_mean(values, mask),
        f"{name}_square_mean": token_mean(values * values, mask),
        # without a valid entry it stays infinite, and metric_values leaves it out
        f"{name}_min": torch.where(valid, values, math.inf).amin(),
        f"{name}_max": torch.where(valid, values, -math.inf).amax(),
    }


MISMATCH = "rollout_train_logprobs_abs_diff"


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> ReducibleMetrics:
    """Return moments of the log-prob mismatch |trainer − engine| in nats, over the entries where ``mask`` is 1; all
    tensors [B, T]."""
    return moments(MISMATCH, (logprobs.detach() - rollout_logprobs).abs(), mask)


def merge_metrics(*parts: Mapping[str, Mean | Tensor]) -> ReducibleMetrics:
    """Merge the metrics of several micro-batches, scalar tensors: add the pairs, reduce ``_min`` and ``_max``."""
    merged: ReducibleMetrics = {}
    for part in parts:
        for name, metric in part.items():
            before = merged.get(name)
            if before is None:
                merged[name] = metric
            elif isinstance(metric, Mean):
                assert isinstance(before, Mean), name
                merged[name] = Mean(before.sum + metric.sum, before.weight + metric.weight)
            else:
                assert not isinstance(before, Mean), name
                merged[name] = (
                    torch.minimum(before, metric) if name.endswith("_min") else torch.maximum(before, metric)
                )
    return merged


@dataclass(slots=True)
class PackedMetrics:
    """Metrics as two tensors: all-reduce ``sums`` with SUM and ``maxima`` with MAX, in place, then :meth:`unpack`.

    Every rank must have the same names. This holds when every rank runs the same losses, also on dummy rows.
    """

    means: tuple[str, ...]
    extremes: tuple[str, ...]
    sums: Tensor
    """[len(means), 2] float64."""
    maxima: Tensor
    """[len(extremes)] float64; minima are negated."""

    def unpack(self) -> ReducibleMetrics:
        """Return the reduced metrics."""
        means: ReducibleMetrics = {name: Mean(*row.unbind()) for name, row in zip(self.means, self.sums, strict=True)}
        extremes = zip(self.extremes, self.maxima, strict=True)
        return means | {name: -value if name.endswith("_min") else value for name, value in extremes}


def pack_metrics(metrics: Mapping[str, Mean | Tensor], device: torch.device | None = None) -> PackedMetrics:
    """Pack ``metrics``, scalar tensors, into two tensors on ``device``, sorted by name so that all ranks use the same
    order."""
    means = {name: metric for name, metric in sorted(metrics.items()) if isinstance(metric, Mean)}
    extremes = {name: metric for name, metric in sorted(metrics.items()) if not isinstance(metric, Mean)}
    sums = [torch.stack([metric.sum, metric.weight]).double() for metric in means.values()]
    # negated, so that one all-reduce with MAX serves both
    maxima = [(-value if name.endswith("_min") else value).double() for name, value in extremes.items()]
    return PackedMetrics(
        tuple(means),
        tuple(extremes),
        (torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)).to(device),
        (torch.stack(maxima) if maxima else torch.zeros(0, dtype=torch.float64)).to(device),
    )


def metric_values(metrics: Mapping[str, Mean | Tensor]) -> dict[str, float]:
    """Return means, extremes and standard deviations of scalar tensors as floats, without metrics that have no valid
    entry."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Mean):
            value = float(metric)
            if math.isfinite(value):
                values[name] = value
        elif (weight := float(metric.weight)) > 0 and not name.endswith("_square_mean"):
            values[name] = float(metric.sum) / weight
            squares = metrics.get(f"{name.removesuffix('_mean')}_square_mean")
            if isinstance(squares, Mean) and name.endswith("_mean"):
                # rounding may make the spread of equal values slightly negative
                spread = float(squares.sum) - float(metric.sum) ** 2 / weight
                values[f"{name.removesuffix('_mean')}_std"] = math.sqrt(max(spread, 0.0) / max(weight - 1, 1))
    return values


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` responses passes, drawn without replacement from ``samples``
    responses of which ``passed`` do: 1 − C(n−c, k) / C(n, k).

    It is the unbiased estimator of arXiv:2107.03374, section 2.1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    _require(samples, k)
    # integers of any size: a product of ratios would round, and overflow for thousands of samples
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], credits: Sequence[float], k: int) -> float:
    """Return the expected credit of the most frequent answer among ``k`` responses drawn without replacement.

    ``answers`` [n] and ``credits`` [n] belong to the responses. The credit of an answer is the mean over the responses
    that gave it. Answers that tie share the vote: each wins with the same probability. With k = n this is the vote of
    all responses (self-consistency, arXiv:2203.11171). Raises ValueError unless 1 ≤ k ≤ n.
    """
    _require(len(answers), k)
    counts = Counter(answers)
    sums: dict[Hashable, float] = dict.fromkeys(counts, 0.0)
    for answer, credit in zip(answers, credits, strict=True):
        sums[answer] += credit
    total = 0.0
    for answer, count in counts.items():
        # what earns nothing adds nothing, and counting its wins is the expensive part
        if sums[answer]:
            others = [number for other, number in counts.items() if other != answer]
            total += sums[answer] / count * _wins(count, others, k)
    return total / comb(len(answers), k)


def _wins(count: int, others: Sequence[int], k: int) -> float:
    """Return the number of choices of k responses that an answer with ``count`` responses wins; a tie of m answers
    counts 1/m. ``others``: numbers of responses of the other answers."""
    wins = 0.0
    for votes in range(1, min(count, k) + 1):
        # ways[chosen, tied]: choices of that many of the others' responses in which that many answers have `votes`
        # of them, and no answer has more.
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for number in others:
            more: Counter[tuple[int, int]] = Counter()
            for (chosen, tied), amount in ways.items():
                for taken in range(min(number, votes, k - votes - chosen) + 1):
                    more[chosen + taken, tied + (taken == votes)] += amount * comb(number, taken)
            ways = more
        decided = sum(amount / (tied + 1) for (chosen, tied), amount in ways.items() if chosen == k - votes)
        wins += comb(count, votes) * decided
    return wins


def _require(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be between 1 and the number of responses, {samples}")
