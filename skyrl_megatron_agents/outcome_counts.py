"""What is counted of how agents' trajectories ended, by cause, and the bound of the share that no agent is to blame
for."""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

from skyrl_megatron.errors import DataError

if TYPE_CHECKING:
    from skyrl_megatron_agents.rows import Outcome

log = logging.getLogger(__name__)
FEWEST = 20
"""Number of trajectories from which on the share is judged."""


class Cause(StrEnum):
    """Why a trajectory ended as it did. The first five are the agent's doing: reward 0, or no sample by a setting."""

    TESTS = "tests"
    """The tests of the task, or the environment of the row, decided."""
    PROGRAM = "program"
    """The agent's program ended badly after it had called the model: the policy's commands can end it."""
    FILES = "files"
    """What the agent left could not be handed in or tested; an empty workspace could."""
    LIMIT = "limit"
    """A limit of the sandbox, or of the trajectory's calls."""
    TIME = "time"
    CONTEXT = "context"
    CALL = "call"
    """A call to the model failed by no fault of the agent."""
    NO_CALL = "no_call"
    """The program ended without any call to the model: it is not set up."""
    SANDBOX = "sandbox"
    """A sandbox did not start, or a repeat with an empty workspace failed too."""
    OTHER = "other"


class OutcomeCounts:
    """Counts of the trajectories of a generator."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._judged: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, outcome: Outcome) -> None:
        """Count a trajectory."""
        from skyrl_megatron_agents.rows import OutcomeKind

        by_kind = {
            OutcomeKind.SOLVED: Cause.TESTS,
            OutcomeKind.PARTLY_SOLVED: Cause.TESTS,
            OutcomeKind.FAILED: Cause.TESTS,
            OutcomeKind.TIMED_OUT: Cause.TIME,
            OutcomeKind.CONTEXT_FULL: Cause.CONTEXT,
        }
        cause = outcome.cause or by_kind.get(outcome.kind, Cause.OTHER)
        self._now[cause] += 1
        self._judged["all"] += 1
        if outcome.kind is OutcomeKind.INFRASTRUCTURE:
            self._judged[cause] += 1
            self._first.setdefault(cause, outcome.why)

    def metrics(self) -> dict[str, float]:
        """Return ``agents/cause_…``: trajectories since the last call of this method."""
        found = {f"agents/cause_{cause.value}": float(self._now[cause]) for cause in Cause}
        self._now = Counter()
        return found

    def judge(self, most: float) -> None:
        """Log how many of the trajectories since the last judgement ended by no fault of an agent. Raise DataError if
        their share is above ``most``. Fewer than :data:`FEWEST` trajectories wait for others."""
        if self._judged["all"] < FEWEST:
            return
        judged, first = self._judged, self._first
        self._judged, self._first = Counter(), {}
        count, failed = judged.pop("all"), judged.total()
        if not failed:
            return
        reasons = "; ".join(f"{number} by {cause}, the first: {first[cause]}" for cause, number in judged.items())
        log.warning("%d of %d trajectories ended by no fault of their agent: %s", failed, count, reasons)
        if failed / count > most:
            raise DataError(
                f"{failed} of {count} trajectories ended by no fault of their agent, a share above"
                f" generator.max_infrastructure_share={most:g}: {reasons}. Fix the cause, or raise the share"
            )
