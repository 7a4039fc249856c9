"""What is kept of a trajectory's turns, so that an interrupted one can go on (``Episode.begin``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_megatron.inference.protocol import Generation


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn: where it started from, what was sampled, what the environment answered."""

    shared: int
    """First tokens of the prompt that are those of the turn before: of its prompt and what it sampled."""
    prompt_rest: np.ndarray
    """[p − shared] int32: the prompt's other tokens."""
    generation: Generation
    answer: dict[str, Any]
    """``observations``, ``reward``, ``done`` and ``postprocessed_action`` of the environment's step."""
    llm_seconds: float = 0.0


def answer_of(step: Any) -> dict[str, Any]:
    """Return what training depends on of a step output."""
    return {
        "observations": [dict(message) for message in step["observations"] or ()],
        "reward": step["reward"],
        "done": bool(step["done"]),
        "postprocessed_action": step.get("postprocessed_action"),
    }


def record_turn(
    before: Sequence[int], prompt: Sequence[int], generation: Generation, step: Any, llm_seconds: float
) -> RecordedTurn:
    """Record a turn. ``before``: the tokens of the turn before, its prompt and what it sampled."""
    known, now = np.asarray(before, np.int32), np.asarray(prompt, np.int32)
    length = min(len(known), len(now))
    differ = np.flatnonzero(known[:length] != now[:length])
    shared = int(differ[0]) if differ.size else length
    return RecordedTurn(shared, now[shared:], generation, answer_of(step), llm_seconds)


def starts_alike(turn: RecordedTurn, before: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether a turn started from ``prompt``, where ``before`` is what it was when it was recorded."""
    recorded = [*before[: turn.shared], *turn.prompt_rest.tolist()]
    return recorded == list(prompt)
