"""Ranks that hold up the others: found by the time that each works itself, named once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

RATIO = 2.0
STEPS = 3
SHORTEST_S = 0.02
"""A rank's own time in a step, below which nobody waits long for it."""


class Stragglers:
    """Of every role the ranks whose own time in training is more than :data:`RATIO` times the median of the others',
    in :data:`STEPS` steps that follow one another. ``say`` gets one line for each, and no second one while it stays
    slow."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._slow: dict[tuple[str, int], int] = {}
        """(role, rank) → steps that it has been slow for."""

    def look(self, role: str, seconds: Sequence[float], names: Sequence[str]) -> dict[str, float]:
        """Take a step's own seconds by rank ([]: not known), and return ``trainer/<role>_slowest_rank_ratio`` and
        ``trainer/<role>_stragglers``. ``names``: how each rank is called."""
        if len(seconds) < 2:
            return {}
        ratios = [_ratio(seconds, rank) for rank in range(len(seconds))]
        for rank, ratio in enumerate(ratios):
            slow = ratio > RATIO and seconds[rank] >= SHORTEST_S
            count = self._slow[role, rank] = self._slow.get((role, rank), 0) + 1 if slow else 0
            if count == STEPS:
                self.say(
                    f"straggler: {names[rank]} worked {seconds[rank]:.2g} s in this step, {ratio:.1f} times as long "
                    f"as the others, and so for {STEPS} steps: look at what else its host does, and at its device"
                )
        found = sum(self._slow[role, rank] >= STEPS for rank in range(len(seconds)))
        return {f"trainer/{role}_slowest_rank_ratio": max(ratios), f"trainer/{role}_stragglers": float(found)}


def _ratio(seconds: Sequence[float], rank: int) -> float:
    others = statistics.median([each for number, each in enumerate(seconds) if number != rank])
    return seconds[rank] / max(others, 1e-9)
