"""The bound on staleness: how far rollouts may run ahead, and how old the tokens of a batch are.

A group whose oldest token is of version v may be trained at version v + bound, its deadline, and not later. A step at
version j takes ``batch`` groups, the oldest first. At any time there are at most ``batch · (bound + 1)`` untrained
groups (:func:`room`); yet several slow ones may come to have the same deadline, while younger ones are trained in
their place. All deadlines can be met as long as, after the step at j and for every k, at most ``batch · k`` groups are
left that are due by j + k: a step that would leave more waits for them (:func:`may_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.trainer.rollout_records import Spans
from skyrl_megatron.types import TrainingBatch


class DoneGroups:
    """The groups that are trained or given up: those numbered below ``oldest``, and those in ``ahead``."""

    def __init__(self, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        self.oldest, self.ahead = oldest, set(ahead)

    def __contains__(self, number: int) -> bool:
        return number < self.oldest or number in self.ahead

    def add(self, number: int) -> None:
        """Note that a group is done."""
        self.ahead.add(number)
        while self.oldest in self.ahead:
            self.ahead.remove(self.oldest)
            self.oldest += 1

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        return {"oldest": self.oldest, "ahead": sorted(self.ahead)}


def room(*, batch: int, bound: int, version: int, steps: int, accepted: int, running: int) -> int:
    """Count the groups that may be started at ``version``.

    ``accepted``: groups that were trained, are trained now or wait for it, since version 0; ``running``: groups that
    are sampled; ``steps``: of the whole run.
    """
    return min(bound + version + 1, steps) * batch - (accepted + running)


def may_step(*, batch: int, bound: int, version: int, running: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Return whether the oldest ``batch`` of the finished groups leave no deadline that cannot be met.

    ``running``, ``finished``: how many groups there are by the version of their oldest token.
    """
    waiting, done = 0, 0
    for left, oldest in enumerate(range(version - bound, version)):
        if left == 0:
            waiting = sum(count for each, count in running.items() if each <= oldest)
            done = sum(count for each, count in finished.items() if each <= oldest)
        else:
            waiting += running.get(oldest, 0)
            done += finished.get(oldest, 0)
        if waiting + max(done - batch, 0) > batch * left:
            return False
    return True


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


class Concurrency:
    """A limit that follows what engines have places for: a request that waits for one only makes its group older.

    ``most``: the limit never exceeds it; ``free``: counts the places that engines have left, negative where requests
    wait; None: the limit stays at ``most``. ``samples``: requests of a group.
    """

    def __init__(self, most: int, free: Callable[[], int] | None = None, samples: int = 1) -> None:
        self.most, self.free, self.samples = most, free, samples
        self.limit = most

    def start(self) -> None:
        """Begin with as many groups as there are places for."""
        if self.free is not None:
            self.limit = self._within(self.free() // self.samples)

    def measure(self, running: int) -> None:
        """Look at the places as a group is done and ``running`` are left: one group less while requests wait, one more
        where the limit kept a whole one from being there."""
        if self.free is None:
            return
        free = self.free()
        if free < 0:
            self.limit = self._within(min(self.limit, running + 1) - 1)
        elif free > self.samples and running + 1 >= self.limit:  # more than what the group has just left
            self.limit = self._within(self.limit + 1)

    def _within(self, limit: int) -> int:
        return max(1, min(limit, self.most))
