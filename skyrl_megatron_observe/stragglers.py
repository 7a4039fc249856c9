"""Ranks that hold up the others: each rank's own time in training, without its waits, compared with the others'."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from skyrl_megatron.trainer.recorders import RecordedRun, RunRecorder

RATIO = 2.0
"""How many times the median of the other ranks a slow rank needs."""
STEPS = 3
"""Consecutive steps after which a slow rank is reported."""
SHORTEST_S = 0.02
"""A shorter time of a rank in a step is not reported: others do not wait long for it."""


class Stragglers:
    """Finds the slow ranks of each role: their own time in training exceeds :data:`RATIO` times the median of the
    others in :data:`STEPS` consecutive steps. ``say`` gets one line for each slow rank, and a second one only if the
    rank was fast in between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._slow: dict[tuple[str, int], int] = {}
        """(role, rank) → consecutive slow steps."""

    def look(self, role: str, seconds_of: Mapping[str, float]) -> dict[str, float]:
        """Record the seconds of each rank in a step, by its display name, and return
        ``trainer/<role>_slowest_rank_ratio`` and ``trainer/<role>_stragglers``; {} for fewer than two ranks."""
        names, seconds = list(seconds_of), list(seconds_of.values())
        if len(seconds) < 2:
            return {}
        ratios = [_ratio(seconds, rank) for rank in range(len(seconds))]
        for rank, ratio in enumerate(ratios):
            slow = ratio > RATIO and seconds[rank] >= SHORTEST_S
            count = self._slow[role, rank] = self._slow.get((role, rank), 0) + 1 if slow else 0
            if count == STEPS:
                self.say(
                    f"straggler: {names[rank]} worked {seconds[rank]:.2g} s in this step, {ratio:.1f} times as long "
                    f"as the others, for {STEPS} steps in a row: check the other load of its host, and its device"
                )
        slow_ranks = sum(self._slow[role, rank] >= STEPS for rank in range(len(seconds)))
        return {f"trainer/{role}_slowest_rank_ratio": max(ratios), f"trainer/{role}_stragglers": float(slow_ranks)}


class StragglerRecorder(RunRecorder):
    """Measures the ranks of each step, and names those that are slow on the console."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        self.stragglers = Stragglers(run.tracker.say)

    def rank_metrics(self, seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for role, of_ranks in seconds.items():
            metrics |= self.stragglers.look(role, of_ranks)
        return metrics


def _ratio(seconds: Sequence[float], rank: int) -> float:
    # The rank itself is left out of the median: of two ranks, each is compared with the other.
    others = statistics.median([took for other, took in enumerate(seconds) if other != rank])
    return seconds[rank] / max(others, 1e-9)
