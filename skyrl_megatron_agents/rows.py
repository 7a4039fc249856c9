"""From the calls of a trajectory to its training rows.

A row is a path of the graph. Every sampled token is a target in exactly one row: of the rows that a rule chooses, the
first that holds a call trains it, and to later ones it is a part of their prompt. So the loss and the gradient of a
mean over tokens do not depend on how a trajectory is split into rows, and neither does the number of targets. The
trajectory has one reward, on the last token of its last row, and one advantage, which all its rows get
(``is_last_step``).

A trajectory that no fault of the policy ended is no sample (:class:`OutcomeKind`): it becomes one masked row with an
error, which belongs to no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.conversation import TrajectoryOutput, Turn, sequence_of
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron_agents.graph import Graph, SampledCall

type Rule = Callable[[Graph], Sequence[SampledCall]]
"""Chooses the calls at the ends of the paths to train on, in the order of their rows."""


class OutcomeKind(StrEnum):
    """How a trajectory ended."""

    SOLVED = "solved"
    """Reward 1 or more."""
    PARTLY_SOLVED = "partly solved"
    """A reward between 0 and 1."""
    FAILED = "failed"
    """The policy did not solve the task. It is a sample like a solved one."""
    TIMED_OUT = "timed out"
    """The agent exceeded its time. It is a sample only where a reward is given for it."""
    CONTEXT_FULL = "context full"
    """The last prompt did not fit into the context. It is a sample only where a reward is given for it."""
    INFRASTRUCTURE = "infrastructure"
    """An engine, a sandbox or the agent's own program failed. Never a sample."""

    @classmethod
    def of(cls, reward: float) -> OutcomeKind:
        """Return how a trajectory with this reward ended."""
        return cls.SOLVED if reward >= 1 else cls.PARTLY_SOLVED if reward > 0 else cls.FAILED


GRADED = (OutcomeKind.SOLVED, OutcomeKind.PARTLY_SOLVED, OutcomeKind.FAILED)
"""Ends with a reward."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a trajectory. Raises DataError for a reward where there can be none, and for a missing one."""

    kind: OutcomeKind
    reward: float | None = None
    """Reward of the trajectory; None if it is no sample."""
    why: str = ""
    """What happened, for the log."""
    cause: str = ""
    """A :class:`~skyrl_megatron_agents.outcome_counts.Cause` by which it is counted; "" is that of its kind."""

    def __post_init__(self) -> None:
        if self.kind is OutcomeKind.INFRASTRUCTURE and self.reward is not None:
            raise DataError(f"outcome {self.kind.value!r} has reward {self.reward}: it is never a sample, give none")
        if self.kind in GRADED and self.reward is None:
            raise DataError(f"outcome {self.kind.value!r} has no reward: give one, or use another outcome")

    @property
    def error(self) -> str | None:
        """Why the trajectory is no sample; None if it is one."""
        if self.reward is not None:
            return None
        return f"{self.kind.value}: {self.why}" if self.why else self.kind.value


def every_path(graph: Graph) -> list[SampledCall]:
    """Rule ``all``: every path, in the order of their last calls."""
    return graph.leaves()


def task_path(graph: Graph) -> list[SampledCall]:
    """Rule ``final``: one path, that of the task. Answers on other paths are not trained on.

    Programs also ask for titles, memories and summaries, before, after and between. So it is a path of the
    conversation whose requests had the most tools, then the longest path, then the most sampled tokens; and of its
    paths the one with the most calls, the last of equal ones.
    """
    if not graph.calls:
        return []
    depth: list[int] = []
    sampled = [0] * len(graph.conversations)
    longest: dict[int, SampledCall] = {}
    for call in graph.calls:
        depth.append(1 if call.parent is None else depth[call.parent.number] + 1)
        sampled[call.conversation] += len(call.generation.token_ids)
        best = longest.get(call.conversation)
        if best is None or depth[call.number] >= depth[best.number]:
            longest[call.conversation] = call

    def rank(number: int) -> tuple[int, int, int, int]:
        return graph.conversations[number].tools, depth[longest[number].number], sampled[number], -number

    return [longest[max(longest, key=rank)]]


def every_call(graph: Graph) -> list[SampledCall]:
    """Rule ``calls``: a row for each call, in order."""
    return list(graph.calls)


RULES: dict[str, Rule] = {"all": every_path, "final": task_path, "calls": every_call}


def rule_of(rule: str | Rule) -> Rule:
    """Return a rule by its name, or the function itself. Raises DataError for an unknown name."""
    if callable(rule):
        return rule
    if rule not in RULES:
        raise DataError(f"unknown rule {rule!r} for the rows of a trajectory: use {', '.join(RULES)}, or a function")
    return RULES[rule]


def targets_of(graph: Graph, rule: str | Rule = "all") -> list[tuple[list[SampledCall], int]]:
    """Return the path of each row and the place in it from which on its calls are targets.

    A path whose calls are all targets of earlier rows makes no row. A call without sampled tokens is no target. Raises
    DataError if the rule returns a call of another graph.
    """
    covered: set[int] = set()
    paths: list[tuple[list[SampledCall], int]] = []
    for chosen in rule_of(rule)(graph):
        if chosen.number >= len(graph.calls) or graph.calls[chosen.number] is not chosen:
            raise DataError(
                "the rule for the rows of a trajectory returned a call of another trajectory: return calls of the "
                "graph that it gets"
            )
        path = chosen.path()
        first = next((index for index, call in enumerate(path) if call.number not in covered), len(path))
        if any(call.generation.token_ids for call in path[first:]):
            paths.append((path, first))
            covered |= {call.number for call in path}
    return paths


def rows_of(graph: Graph, rule: str | Rule = "all", reward: float = 0.0) -> list[TrajectoryOutput]:
    """Return the rows of a trajectory (:func:`targets_of`); [] if no call is chosen. ``reward``: on the last token of
    the last row."""
    paths = targets_of(graph, rule)
    last = len(paths) - 1
    return [_row(path, first, reward if place == last else 0.0) for place, (path, first) in enumerate(paths)]


def _row(path: Sequence[SampledCall], first: int, reward: float) -> TrajectoryOutput:
    """Return the row of a path whose calls from number ``first`` on are its targets."""
    turns = [Turn(call.start, call.generation, len(call.generation.token_ids), 0, 0.0) for call in path]
    turns[-1].reward = reward
    reason = path[-1].generation.finish_reason
    return sequence_of(path[-1].ids, path[first].start, turns[first:], reason, before=turns[:first])


def trajectory_of(
    graph: Graph, outcome: Outcome, rule: str | Rule = "all", *, end_token: int, seconds: float = 0.0
) -> Trajectory:
    """Return a trajectory with at least one row. ``end_token``: of the row of a trajectory that has none."""
    error = outcome.error
    rows = [] if error else rows_of(graph, rule, outcome.reward or 0.0)
    if not rows:
        why = f"; {outcome.why}" if outcome.why else ""
        error = error or f"{OutcomeKind.INFRASTRUCTURE.value}: the agent made no call to the model{why}"
        end = np.asarray([end_token], np.int32)
        first = np.asarray(graph.calls[0].prompt_ids, np.int32) if graph.calls else end.copy()
        has_logprobs = all(len(call.generation.logprobs) == len(call.generation.token_ids) for call in graph.calls)
        logprobs = np.zeros(1, np.float32) if has_logprobs else None
        rows = [TrajectoryOutput(first, end, np.zeros(1, np.uint8), [0.0], "error", logprobs, error=error)]
    rows[-1].env_metrics = metrics_of(graph, outcome)
    return Trajectory(rows, turns=len(graph.calls), seconds=seconds)


def metrics_of(graph: Graph, outcome: Outcome) -> dict[str, float]:
    """Return the metrics of a trajectory: shares of outcomes, paths, and the share of calls whose prompt holds every
    earlier answer as the tokens that were sampled (``token_in_rate``)."""
    metrics = {f"outcome_{kind.value.replace(' ', '_')}": float(outcome.kind is kind) for kind in OutcomeKind}
    metrics |= {"calls": float(len(graph.calls)), "forks": float(graph.forks())}
    if graph.calls:
        exact = sum(not call.text_only for call in graph.calls)
        metrics["token_in_rate"] = exact / len(graph.calls)
    return metrics
