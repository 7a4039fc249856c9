"""Counts of how trajectories ended, by cause, and the share of no agent's fault from which on a run stops."""

import logging

import pytest

from skyrl_megatron.errors import DataError
from skyrl_megatron_agents.outcome_counts import FEWEST, Cause, OutcomeCounts


def test_counts_by_cause(caplog):
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind

    counts = OutcomeCounts()
    broken = Outcome(OutcomeKind.INFRASTRUCTURE, why="no space", cause=Cause.SANDBOX)
    ends = [
        *[Outcome(OutcomeKind.SOLVED, 1.0), Outcome(OutcomeKind.FAILED, 0.0), Outcome(OutcomeKind.TIMED_OUT)] * 3,
        *[Outcome(OutcomeKind.FAILED, 0.0, "deep", Cause.FILES), Outcome(OutcomeKind.CONTEXT_FULL)] * 2,
    ]
    for outcome in (*ends, broken, Outcome(OutcomeKind.INFRASTRUCTURE)):
        counts.add(outcome)
    counts.judge(0.0)  # of too few
    made = counts.metrics()
    assert {name.removeprefix("agents/cause_"): value for name, value in made.items() if value} == {
        "tests": 6,
        "time": 3,
        "files": 2,
        "context": 2,
        "sandbox": 1,
        "other": 1,
    }
    assert made.keys() == counts.metrics().keys() and not any(counts.metrics().values()), "since the last call"
    for _ in range(FEWEST - 15):
        counts.add(broken)
    with caplog.at_level(logging.WARNING):
        counts.judge(0.35)
    assert "7 of 20 trajectories" in caplog.text and "6 by sandbox, the first: no space" in caplog.text
    for outcome in [broken] * 8 + [ends[0]] * 12:
        counts.add(outcome)
    with pytest.raises(DataError, match=r"8 of 20 .* above generator.max_infrastructure_share=0.35: 8 by sandbox"):
        counts.judge(0.35)
