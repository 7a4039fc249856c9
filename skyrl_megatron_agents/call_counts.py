"""What is counted of agents' calls, and the bound of the token-in rate."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from skyrl_megatron.errors import DataError

log = logging.getLogger(__name__)
NAMES = ("calls", "retries", "refused", "unattributed", "unmatched")
FEWEST = 50
"""Number of calls from which on their token-in rate is judged."""


class CallCounts:
    """``calls``: that were sampled. ``retries``: that got an earlier answer. ``refused``: for their key or an ended
    trajectory. ``unattributed``: of the refused, those without the key of their trajectory. ``unmatched``: sampled
    calls whose prompt has an answer that no path of the trajectory holds, so that it is text and not tokens."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.seconds: list[float] = []
        """Of each call, without those of sampling."""
        self.first_unmatched = ""
        """Where a request first differed from the sampled messages, with its trajectory."""
        self._judged: Counter[str] = Counter()

    def sampled(self, seconds: float, *, unmatched: bool) -> None:
        """Count a call that was sampled and recorded."""
        self.seconds.append(seconds)
        for counts in (self.now, self._judged):
            counts["calls"] += 1
            counts["unmatched"] += unmatched

    def metrics(self) -> dict[str, float]:
        """Return ``agents/…`` since the last call of this method."""
        counts, seconds = self.now, np.asarray(self.seconds or [0.0])
        found = {f"agents/{name}": float(counts[name]) for name in NAMES}
        found["agents/token_in_rate"] = _rate(counts)
        found["agents/own_ms_median"] = float(np.median(seconds)) * 1e3
        found["agents/own_ms_p99"] = float(np.percentile(seconds, 99)) * 1e3
        self.now, self.seconds = Counter(), []
        return found

    def judge(self, least: float) -> None:
        """Log the first unmatched call. Raise DataError if the token-in rate of the calls since the last judgement is
        below ``least``. Fewer than :data:`FEWEST` calls wait for others."""
        counts, first = self._judged, self.first_unmatched
        if counts["calls"] < FEWEST:
            return
        self._judged, self.first_unmatched = Counter(), ""
        if counts["unmatched"]:
            log.warning("%d of %d calls are unmatched: %s", counts["unmatched"], counts["calls"], first)
        if (rate := _rate(counts)) < least:
            raise DataError(
                f"the token-in rate of {counts['calls']} calls is {rate:.3f}, below"
                f" generator.min_token_in_rate={least:g}: the agent returns answers that were not sampled. {first}."
                " Let the agent return answers as it got them, or lower the bound"
            )


def _rate(counts: Counter[str]) -> float:
    return 1 - counts["unmatched"] / counts["calls"] if counts["calls"] else 1.0
