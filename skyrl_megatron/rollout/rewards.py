"""Rewards of trajectories: checks of what environments return, sums, filters and scores."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.interface import GeneratorOutput, MetricsOutput, Tokens


class NonFiniteReward(DataError):
    """An environment returned NaN or an infinite reward."""


def checked_reward(value: Any, env_class: str, name: str) -> float:
    """Return ``value`` as a float.

    Raises DataError naming environment, trajectory and value if it is not one number; NonFiniteReward for NaN and
    infinities.
    """
    where = f"environment {env_class!r}, trajectory {name}"
    if isinstance(value, str | bytes) or value is None or np.ndim(value) != 0:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number")
    try:
        reward = float(value)
    except OverflowError as error:  # its digits may be more than Python prints
        raise DataError(
            f"{where}: the reward ({type(value).__name__}) is beyond what a float can be, it must be a smaller number"
        ) from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number") from error
    if not math.isfinite(reward):
        raise NonFiniteReward(
            f"{where}: the reward is {reward}; return a finite one, or mask such trajectories with"
            " trainer.algorithm.nonfinite=skip"
        )
    return reward


def total_reward(reward: float | Sequence[float] | np.ndarray) -> float:
    """Return the sum over the tokens of a row, or the row's one reward."""
    return float(sum(reward)) if isinstance(reward, Sequence | np.ndarray) else float(reward)


def last_reward(reward: float | Sequence[float] | np.ndarray) -> float:
    """Return the reward on the last token of a row, which is that of its last turn, or the row's one reward."""
    return float(reward[-1]) if isinstance(reward, Sequence | np.ndarray) else float(reward)


def zero_where_not_stopped(rewards: Sequence[Any], stop_reasons: Sequence[str]) -> list[Any]:
    """Set the rewards of rows that were cut off to 0 (``zero_reward_on_non_stop``)."""
    zeros = ([0.0] * len(reward) if isinstance(reward, list) else 0.0 for reward in rewards)
    return [
        kept if reason == "stop" else zero for kept, zero, reason in zip(rewards, zeros, stop_reasons, strict=True)
    ]


def apply_overlong_filtering(loss_masks: Sequence[Tokens], stop_reasons: Sequence[str]) -> list[Tokens]:
    """Set the masks of rows that were cut off to 0 (DAPO, arXiv:2503.14476, section 3.4)."""
    return [
        mask if reason == "stop" else np.zeros_like(np.asarray(mask))
        for mask, reason in zip(loss_masks, stop_reasons, strict=True)
    ]


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Score a batch; ``uids`` [rows] name the prompt of each row.

    ``avg_score``: mean total reward. ``pass_at_n``: share of prompts with a trajectory whose last reward is positive.
    ``mean_positive_reward``: mean over trajectories of their positive rewards. Step-wise, a trajectory counts by its
    last row. Raises DataError for an empty batch.
    """
    rewards = generator_output["rewards"]
    last = generator_output.get("is_last_step") or [True] * len(rewards)
    rows = [row for row, is_last in enumerate(last) if is_last]
    if not rows:
        raise DataError("there is nothing to score: the batch holds no trajectory")
    passed: dict[str, bool] = defaultdict(bool)
    for row in rows:
        passed[uids[row]] |= last_reward(rewards[row]) > 0
    positive = [
        total_reward(np.maximum(rewards[row], 0.0)) if np.ndim(rewards[row]) else max(rewards[row], 0.0)
        for row in rows
    ]
    return {
        "avg_score": float(np.mean([total_reward(rewards[row]) for row in rows])),
        "pass_at_n": sum(passed.values()) / len(passed),
        "mean_positive_reward": float(np.mean(positive)),
    }
