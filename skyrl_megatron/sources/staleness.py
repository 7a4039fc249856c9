"""The bound on staleness: how far rollouts may run ahead of training, and the age of the tokens of a batch.

A group whose oldest token has version v must be trained at version v + bound, its deadline, or earlier. A step at
version j takes ``batch`` groups, the oldest first. At any time there are at most ``batch · (bound + 1)`` untrained
groups (:func:`max_new_groups`). Still, several slow groups may reach the same deadline while younger ones are trained
first. All deadlines can be met if, after the step at j and for every k, at most ``batch · k`` of the remaining groups
have a deadline of j + k or earlier. A step that would leave more of them waits (:func:`can_step`).
``rollout_stream.py`` applies the bound, and drops groups that are older than the limits of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.sources.records import Spans
from skyrl_megatron.types import RowSpans, TrainingBatch


class DoneGroups:
    """The groups that were trained or given up: the numbers below ``oldest``, and those in ``ahead``."""

    def __init__(self, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        self.oldest, self.ahead = oldest, set(ahead)

    def __contains__(self, number: int) -> bool:
        return number < self.oldest or number in self.ahead

    def add(self, number: int) -> None:
        """Mark a group as done."""
        self.ahead.add(number)
        while self.oldest in self.ahead:
            self.ahead.remove(self.oldest)
            self.oldest += 1

    def state(self) -> dict[str, Any]:
        """Return the numbers as plain values, for a checkpoint."""
        return {"oldest": self.oldest, "ahead": sorted(self.ahead)}


def max_new_groups(*, batch: int, bound: int, version: int, steps: int, accepted: int, running: int) -> int:
    """Return how many groups may be started at ``version``.

    ``accepted``: groups since version 0 that were trained, are being trained or wait for training; ``running``: groups
    that are being sampled; ``steps``: steps of the whole run.
    """
    return min(bound + version + 1, steps) * batch - (accepted + running)


def can_step(*, batch: int, bound: int, version: int, running: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Return whether all deadlines can be met after a step with the oldest ``batch`` finished groups.

    ``running``, ``finished``: version of the oldest token → number of groups.
    """
    waiting, done = 0, 0
    for left, oldest in enumerate(range(version - bound, version)):
        if left == 0:
            # Groups of older versions than the bound allows are due now as well.
            waiting = sum(count for started, count in running.items() if started <= oldest)
            done = sum(count for started, count in finished.items() if started <= oldest)
        else:
            waiting += running.get(oldest, 0)
            done += finished.get(oldest, 0)
        if waiting + max(done - batch, 0) > batch * left:
            return False
    return True


def token_staleness(spans: Spans, responses: RowSpans, version: int) -> Tensor:
    """Return the staleness of each token of the ``responses``, [R] int32: ``version`` minus its sampling version.

    It is -1 for tokens that were not sampled or whose version is not a number.
    """
    lags = torch.full((responses.size,), -1, dtype=torch.int32)
    for spans_of_row, start in zip(spans, responses.starts.tolist(), strict=True):
        for name, first, end in spans_of_row:
            if name.isdecimal():
                lags[start + first : start + end] = version - int(name)
    return lags


def token_staleness_metrics(batch: TrainingBatch, lags: Tensor, bound: int, prefix: str = "async") -> dict[str, float]:
    """Return ``<prefix>/…`` metrics over the trained tokens; ``lags`` [R]: of :func:`token_staleness`.

    ``token_lag_mean``; ``token_lag_<k>``: share of the tokens that are k steps old; ``logprob_diff_lag_<k>``: their
    mean |trainer − engine| log-prob before the update, in nats, if both are known; ``mixed_rows``: share of the rows
    that several versions sampled.
    """
    trained = batch.loss_mask & (lags >= 0)
    if not trained.any():
        return {}
    # as floats, which are exact for steps: -inf, the largest of an empty row, is no integer
    least = -batch.responses.largest(-torch.where(trained, lags, lags.max() + 1).float())
    most = batch.responses.largest(torch.where(trained, lags, -1).float())
    rows = most >= 0
    metrics = {
        f"{prefix}/token_lag_mean": lags[trained].double().mean().item(),
        f"{prefix}/mixed_rows": (least < most)[rows].double().mean().item(),
    }
    mismatch = None
    if batch.old_logprobs is not None and batch.rollout_logprobs is not None:
        mismatch = (batch.old_logprobs - batch.rollout_logprobs).abs().double()
    for lag in range(bound + 1):
        here = trained & (lags == lag)
        metrics[f"{prefix}/token_lag_{lag}"] = (here.sum() / trained.sum()).item()
        if mismatch is not None and here.any():
            metrics[f"{prefix}/logprob_diff_lag_{lag}"] = mismatch[here].mean().item()
    return metrics


class Concurrency:
    """A limit on concurrent groups that follows the engines' free request slots: a group only gets older while its
    requests wait for a slot.

    ``most``: maximum of the limit; ``free``: returns the number of free slots, negative if requests wait, None for a
    constant limit of ``most``; ``samples``: requests per group.
    """

    def __init__(self, most: int, free: Callable[[], int] | None = None, samples: int = 1) -> None:
        self.most, self.free, self.samples = most, free, samples
        self.limit = most

    def start(self) -> None:
        """Set the limit to the groups that the free slots can serve."""
        if self.free is not None:
            self.limit = self._within(self.free() // self.samples)

    def measure(self, running: int) -> None:
        """Adjust the limit after a group has finished and ``running`` are left: lower it by one while requests wait,
        raise it by one if a whole group would fit and only the limit prevents it."""
        if self.free is None:
            return
        free = self.free()
        if free < 0:
            self.limit = self._within(min(self.limit, running + 1) - 1)
        elif free > self.samples and running + 1 >= self.limit:  # more than the slots of the finished group
            self.limit = self._within(self.limit + 1)

    def _within(self, limit: int) -> int:
        return max(1, min(limit, self.most))
