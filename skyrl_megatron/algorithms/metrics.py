"""Metrics that reduce exactly: over micro-batches, ranks, and any way of cutting a batch into them.

A metric is one of two things, distinguished by type:

* :class:`Mean`, a sum and a weight, mostly a count of tokens; both scalar tensors in float64. Adding the pairs of two
  parts gives the pair of the whole. A quantity that is no mean but a total (the loss of the step) is a pair too: the
  part's share of the value, and its share of the step, which add up to the value and to 1.
* a scalar tensor whose name ends in ``_min`` or ``_max``.

A standard deviation comes from two pairs: ``x_mean`` and ``x_square_mean`` become ``x_mean`` and ``x_std``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked


class Mean(NamedTuple):
    """Sum and weight (count) of a mean, scalar float64 tensors."""

    sum: Tensor
    weight: Tensor


type ReducibleMetrics = dict[str, Mean | Tensor]
"""Metrics by name, not yet numbers: see :func:`metric_values`."""


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean of ``values`` (bool or floating, shaped as ``mask``) over the entries where ``mask`` is 1."""
    kept = keep_masked(values.detach().double(), mask)
    return Mean(kept.sum(), (mask > 0).sum().double())


def moments(name: str, values: Tensor, mask: Tensor) -> ReducibleMetrics:
    """Return ``{name}_{mean,square_mean,min,max}`` of ``values`` over the entries where ``mask`` is 1."""
    values, valid = values.detach().double(), mask > 0
    return {
        f"{name}_mean": token_mean(values, mask),
        f"{name}_square_mean": token_mean(values * values, mask),
        f"{name}_min": torch.where(valid, values, math.inf).amin(),
        f"{name}_max": torch.where(valid, values, -math.inf).amax(),
    }


GAP = "rollout_train_logprobs_abs_diff"


def gap_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> ReducibleMetrics:
    """Return moments of |log-prob of the trainer − of the engine|, nats, over the entries where ``mask`` is 1."""
    return moments(GAP, (logprobs.detach() - rollout_logprobs).abs(), mask)


def merge_metrics(*parts: Mapping[str, Mean | Tensor]) -> ReducibleMetrics:
    """Merge the metrics of several parts (micro-batches): add the pairs, take ``_min`` and ``_max``."""
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

    Every rank must hold the same names, which it does when every rank runs the same losses, on dummy rows too.
    """

    means: tuple[str, ...]
    extremes: tuple[str, ...]
    sums: Tensor
    """[len(means), 2] float64."""
    maxima: Tensor
    """[len(extremes)] float64, minima negated."""

    def unpack(self) -> ReducibleMetrics:
        """Return the metrics, after the reduction."""
        means: ReducibleMetrics = {name: Mean(*row.unbind()) for name, row in zip(self.means, self.sums, strict=True)}
        extremes = zip(self.extremes, self.maxima, strict=True)
        return means | {name: -value if name.endswith("_min") else value for name, value in extremes}


def pack_metrics(metrics: Mapping[str, Mean | Tensor], device: torch.device | None = None) -> PackedMetrics:
    """Pack ``metrics`` into two tensors on ``device``, in sorted order of their names so that ranks agree."""
    means = {name: metric for name, metric in sorted(metrics.items()) if isinstance(metric, Mean)}
    extremes = {name: metric for name, metric in sorted(metrics.items()) if not isinstance(metric, Mean)}
    sums = [torch.stack([metric.sum, metric.weight]).double() for metric in means.values()]
    maxima = [(-value if name.endswith("_min") else value).double() for name, value in extremes.items()]
    return PackedMetrics(
        tuple(means),
        tuple(extremes),
        (torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)).to(device),
        (torch.stack(maxima) if maxima else torch.zeros(0, dtype=torch.float64)).to(device),
    )


def metric_values(metrics: Mapping[str, Mean | Tensor]) -> dict[str, float]:
    """Return plain numbers for the log: means, extremes, standard deviations; leave out what has no valid entry."""
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
                spread = float(squares.sum) - float(metric.sum) ** 2 / weight
                values[f"{name.removesuffix('_mean')}_std"] = math.sqrt(max(spread, 0.0) / max(weight - 1, 1))
    return values
