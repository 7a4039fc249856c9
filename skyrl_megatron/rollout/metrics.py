"""Metrics of a rollout: lengths, turns, times, and those that the environments report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_megatron.envs import registry
from skyrl_megatron.rollout.interface import Tokens
from skyrl_megatron.rollout.rewards import total_reward


def get_rollout_metrics(
    responses: Sequence[Tokens],
    rewards: Sequence[Any],
    env_metrics: Sequence[Mapping[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
    loss_masks: Sequence[Tokens] | None = None,
    trajectory_completion_times: Sequence[float] | None = None,
    trajectory_time_splits: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Return ``generate/*`` and ``environment/*`` over the rows of a batch.

    ``loss_masks`` gives tokens by the policy alone and by turn; ``trajectory_completion_times`` [trajectories] and
    their shares by name give ``generate/trajectory_time_*``, seconds.
    """
    lengths = np.asarray([len(response) for response in responses], dtype=np.float64)
    totals = np.asarray([total_reward(reward) for reward in rewards])
    metrics = {f"generate/{name}_num_tokens": value for name, value in _spread(lengths).items()}
    metrics["generate/avg_tokens_non_zero_rewards"] = _mean(lengths[totals > 0])
    metrics["generate/avg_tokens_zero_rewards"] = _mean(lengths[totals == 0])
    if loss_masks is not None:
        sampled = np.asarray([np.count_nonzero(mask) for mask in loss_masks], dtype=np.float64)
        metrics |= {f"generate/{name}_assistant_tokens": value for name, value in _spread(sampled).items()}
        turns = turn_lengths(loss_masks)
        if len(turns):
            spread = {"mean": turns.mean(), "std": turns.std(), "max": turns.max()}
            metrics |= {f"generate/tokens_per_turn_{name}": float(value) for name, value in spread.items()}
    if trajectory_completion_times:
        splits = dict(trajectory_time_splits or {})
        whole = np.asarray(trajectory_completion_times, dtype=np.float64)
        metrics |= _times("completion", whole)
        for name, times in splits.items():
            metrics |= _times(name, np.asarray(times, dtype=np.float64))
        if splits:
            metrics |= _times("other", whole - sum(np.asarray(times) for times in splits.values()))
    if env_metrics is not None and env_classes is not None:
        metrics |= _environment_metrics(env_metrics, env_classes)
    return metrics


def turn_lengths(loss_masks: Sequence[Tokens]) -> np.ndarray:
    """Return the lengths of all runs of ones, over all rows: the turns of the policy."""
    end = np.zeros(1, bool)
    flat = np.concatenate([end, *(part for mask in loss_masks for part in (np.asarray(mask, dtype=bool), end))])
    edges = np.diff(flat.astype(np.int8))
    return np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)


def _environment_metrics(env_metrics: Sequence[Mapping[str, Any]], env_classes: Sequence[str]) -> dict[str, float]:
    by_class: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for env_class, metrics in zip(env_classes, env_metrics, strict=True):
        if metrics:
            by_class[env_class].append(metrics)
    found: dict[str, float] = {}
    for env_class, episodes in by_class.items():
        for name, value in registry.aggregate_metrics(env_class, episodes).items():
            found[f"environment/{name}"] = value
    return found


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "avg": float(values.mean()),
        "std": float(values.std()),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _times(name: str, seconds: np.ndarray) -> dict[str, float]:
    statistics = {"mean": seconds.mean(), "p90": np.percentile(seconds, 90), "max": seconds.max()}
    return {f"generate/trajectory_time_{name}_{key}": float(value) for key, value in statistics.items()}
