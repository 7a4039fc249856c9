"""Functions on generator outputs: make, validate, join, select rows, compute metrics, make the training batch."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from skyrl_megatron.config import GeneratorConfig
from skyrl_megatron.data.batch import collate, failed_uid
from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning
from skyrl_megatron.inference.protocol import CUT_OFF
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import (
    BatchMetadata,
    GeneratorInput,
    GeneratorOutput,
    Tokens,
    TrainingPhase,
    TrajectoryID,
    apply_overlong_filtering,
    has_token_rewards,
    sampled_trajectories,
    zero_where_not_stopped,
)
from skyrl_megatron.types import TokenSupport, TrainingBatch


def merge_stepwise_output(output: GeneratorOutput) -> GeneratorOutput:
    """Join adjacent rows of a trajectory if prompt + response of the first row is a prefix of the second row's prompt.

    The other tokens of the second prompt become masked tokens of the response. ``stop_reasons``, ``env_metrics``,
    ``errors`` and ``is_last_step`` are those of the last joined row. Raises DataError for routed experts, which cannot
    be joined, and for rows that are not step-wise.
    """
    if any(routes is not None for routes in output.get("rollout_expert_indices") or ()):
        raise DataError(
            "generator.merge_stepwise_output cannot join routed experts: set"
            " generator.inference_engine.enable_return_routed_experts=false"
        )
    ids, last = output.get("trajectory_ids"), output.get("is_last_step")
    if ids is None or last is None:
        raise DataError("generator.merge_stepwise_output needs generator.step_wise_trajectories=true")
    groups: list[list[int]] = []
    end = np.zeros(0, np.int64)  # prompt + response of the group so far
    for row in range(len(ids)):
        prompt = np.asarray(output["prompt_token_ids"][row])
        continues = row > 0 and not last[row - 1] and _begins_with(prompt, end)
        groups[-1].append(row) if continues else groups.append([row])
        end = np.concatenate([prompt, np.asarray(output["response_ids"][row])])
    return _join(output, groups)


def _begins_with(whole: np.ndarray, beginning: np.ndarray) -> bool:
    return len(beginning) <= len(whole) and bool((whole[: len(beginning)] == beginning).all())


def _join(output: GeneratorOutput, groups: Sequence[Sequence[int]]) -> GeneratorOutput:
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    gaps: dict[int, np.ndarray] = {}  # row → tokens between the previous row and its response
    for group in groups:
        for before, row in pairwise(group):
            gaps[row] = np.asarray(prompts[row])[len(prompts[before]) + len(responses[before]) :]

    def joined(values: Sequence[Tokens], between: bool = False) -> list[np.ndarray]:
        rows = []
        for group in groups:
            pieces = [np.asarray(values[group[0]])]
            for row in group[1:]:
                value = np.asarray(values[row])
                pieces += [gaps[row] if between else np.zeros(len(gaps[row]), value.dtype), value]
            rows.append(np.concatenate(pieces))
        return rows

    merged: dict[str, Any] = {}
    for key, value in output.items():
        if not isinstance(value, list) or len(value) != len(responses):
            merged[key] = value
        elif key == "prompt_token_ids":
            merged[key] = [value[group[0]] for group in groups]
        elif key == "response_ids":
            merged[key] = joined(value, between=True)
        elif key in ("loss_masks", "rollout_logprobs"):
            merged[key] = joined(value)
        elif key == "rollout_support":
            merged[key] = [_joined_support(value, responses, gaps, group) for group in groups]
        elif key == "rewards":
            merged[key] = [row.tolist() for row in joined(value)]
        elif key == "rollout_versions":
            merged[key] = [_joined_versions(value, responses, gaps, group) for group in groups]
        else:
            merged[key] = [value[group[-1]] for group in groups]
    return cast(GeneratorOutput, merged)


def _joined_support(
    supports: Sequence[TokenSupport | None],
    responses: Sequence[Tokens],
    gaps: dict[int, np.ndarray],
    group: Sequence[int],
) -> TokenSupport:
    pieces = []
    for row in group:
        pieces += [TokenSupport.none(len(gaps.get(row, ()))), supports[row] or TokenSupport.none(len(responses[row]))]
    return TokenSupport.joined(pieces)


def _joined_versions(
    versions: Sequence[Sequence[tuple[str, int, int]]],
    responses: Sequence[Tokens],
    gaps: dict[int, np.ndarray],
    group: Sequence[int],
) -> list[tuple[str, int, int]]:
    spans, offset = [], 0
    for row in group:
        offset += len(gaps.get(row, ()))
        spans += [(name, offset + first, offset + after) for name, first, after in versions[row]]
        offset += len(responses[row])
    return spans


def get_rollout_metrics(
    responses: Sequence[Tokens],
    rewards: Sequence[float],
    env_metrics: Sequence[Mapping[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
    loss_masks: Sequence[Tokens] | None = None,
    trajectory_completion_times: Sequence[float] | None = None,
    trajectory_time_splits: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """Return the metrics ``generate/*`` and ``environment/*`` over the rows of a batch.

    ``rewards`` [rows]: of the row's trajectory (:func:`rewards_of_rows`).
    ``loss_masks`` adds the numbers of sampled tokens, in total and per turn. ``trajectory_completion_times``
    [trajectories] in seconds, and their parts by name, add ``generate/trajectory_time_*``.
    """
    lengths = np.asarray([len(response) for response in responses], dtype=np.float64)
    totals = np.asarray(rewards, dtype=np.float64)
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
        completion = np.asarray(trajectory_completion_times, dtype=np.float64)
        metrics |= _times("completion", completion)
        for name, times in splits.items():
            metrics |= _times(name, np.asarray(times, dtype=np.float64))
        if splits:
            metrics |= _times("other", completion - sum(np.asarray(times) for times in splits.values()))
    if env_metrics is not None and env_classes is not None:
        metrics |= _environment_metrics(env_metrics, env_classes)
    return metrics


def turn_lengths(loss_masks: Sequence[Tokens]) -> np.ndarray:
    """Return the lengths of the policy's turns over all rows, [turns] int64: the runs of ones in the masks."""
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


def prepare_generator_input(
    prompts: Sequence[dict[str, Any]],
    n_samples_per_prompt: int,
    sampling_params: dict[str, Any] | None,
    default_env_class: str,
    training_phase: TrainingPhase,
    global_step: int,
) -> tuple[GeneratorInput, list[str]]:
    """Return (generator input with each prompt ``n_samples_per_prompt`` times, uid of each entry).

    ``prompts``: entries ``{prompt, env_class, env_extras, uid}`` of a data loader. Entries without ``env_class`` get
    ``default_env_class``.
    """
    entries = [(entry, sample) for entry in prompts for sample in range(n_samples_per_prompt)]
    uids = [str(entry["uid"]) for entry, _ in entries]
    made: GeneratorInput = {
        "prompts": [entry["prompt"] for entry, _ in entries],
        "env_classes": [entry["env_class"] or default_env_class for entry, _ in entries],
        "env_extras": [entry["env_extras"] for entry, _ in entries],
        "sampling_params": sampling_params,
        "trajectory_ids": [TrajectoryID(str(entry["uid"]), sample) for entry, sample in entries],
        "batch_metadata": BatchMetadata(global_step, training_phase),
    }
    return made, uids


def rewards_of_rows(output: GeneratorOutput) -> list[float]:
    """Return the reward of each row's trajectory."""
    rewards = [0.0] * len(output["rewards"])
    for trajectory in sampled_trajectories(output, [""] * len(rewards)):
        for row in trajectory.rows:
            rewards[row] = trajectory.reward
    return rewards


def row_uids(output: GeneratorOutput, uids: Sequence[str]) -> list[str]:
    """Return the uid of each row, given the ``uids`` of trajectories: step-wise, a trajectory has several rows."""
    ids = output.get("trajectory_ids")
    return [each.instance_id for each in ids] if ids and output.get("is_last_step") else list(uids)


def make_generator_output(
    trajectories: Sequence[Trajectory],
    env_classes: Sequence[str],
    ids: Sequence[TrajectoryID],
    config: GeneratorConfig,
) -> GeneratorOutput:
    """Return the rows of all trajectories. Warns once per batch if environments failed.

    Raises DataError if every trajectory failed.
    """
    _check_failures(trajectories, env_classes)
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    reasons = [row.stop_reason for row in rows]
    ends = [trajectory.rows[-1].stop_reason for trajectory in trajectories for _ in trajectory.rows]
    last = [row is trajectory.rows[-1] for trajectory in trajectories for row in trajectory.rows]
    responses: list[Tokens] = [row.response_ids for row in rows]
    masks: list[Tokens] = [row.loss_mask for row in rows]
    one_turn = config.max_turns == 1 and not config.step_wise_trajectories
    rewards: list[Any] = [sum(row.reward) for row in rows] if one_turn else [row.reward for row in rows]
    logprobs: list[Tokens] = [row.rollout_logprobs for row in rows if row.rollout_logprobs is not None]
    routes = [row.rollout_expert_indices for row in rows]
    supports = [row.rollout_support for row in rows]
    output: GeneratorOutput = {
        "prompt_token_ids": [row.prompt_ids for row in rows],
        "response_ids": responses,
        "rewards": rewards,
        "loss_masks": apply_overlong_filtering(masks, ends) if config.apply_overlong_filtering else masks,
        "stop_reasons": reasons,
        "rollout_metrics": None,
        "rollout_logprobs": logprobs if len(logprobs) == len(rows) else None,
        "trajectory_ids": [id for id, trajectory in zip(ids, trajectories, strict=True) for _ in trajectory.rows],
        "rollout_expert_indices": None if all(row is None for row in routes) else routes,
        "rollout_support": None if all(row is None for row in supports) else supports,
        "rollout_versions": [row.versions for row in rows],
        "env_metrics": [row.env_metrics for row in rows],
        "parsed_answers": [row.parsed_answer for row in rows],
        "errors": [row.error for row in rows],
        "is_last_step": last if config.step_wise_trajectories else None,
    }
    metrics = get_rollout_metrics(
        responses,
        rewards_of_rows(output),
        [trajectory.rows[-1].env_metrics for trajectory in trajectories],
        env_classes,
        masks,
        [trajectory.seconds for trajectory in trajectories],
        {"llm": [t.llm_seconds for t in trajectories], "env": [t.env_seconds for t in trajectories]},
    )
    output["rollout_metrics"] = {**metrics, **_trajectory_metrics(trajectories)}
    if config.zero_reward_on_non_stop:
        output["rewards"] = zero_where_not_stopped(rewards, ends)
    return merge_stepwise_output(output) if config.merge_stepwise_output else output


def _trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of failed, truncated and unfinished trajectories, and of turns."""
    reasons = [trajectory.rows[-1].stop_reason for trajectory in trajectories]
    return {
        "generate/num_failed": float(sum(reason == "error" for reason in reasons)),
        "generate/num_unfinished": float(sum(trajectory.unfinished for trajectory in trajectories)),
        "generate/truncated_ratio": float(np.mean([reason in CUT_OFF for reason in reasons])),
        "generate/avg_turns": float(np.mean([trajectory.turns for trajectory in trajectories])),
    }


def _check_failures(trajectories: Sequence[Trajectory], env_classes: Sequence[str]) -> None:
    failed = [(env, error) for env, t in zip(env_classes, trajectories, strict=True) if (error := t.rows[-1].error)]
    if not failed:
        return
    env_class, error = failed[0]
    text = f"{len(failed)} of {len(trajectories)} trajectories: environment {env_class!r} failed ({error})"
    if len(failed) == len(trajectories):
        raise DataError(f"{text}, so the batch has no data to train on")
    warnings.warn(f"{text}; the failed trajectories are masked", SkyRLMegatronWarning, stacklevel=3)


def select_rows(output: GeneratorOutput, rows: Sequence[int]) -> GeneratorOutput:
    """Return ``rows``, in the given order. Entries without one value per row stay unchanged."""
    selected: dict[str, Any] = dict(output)
    for key, value in selected.items():
        if isinstance(value, list) and len(value) == len(output["response_ids"]):
            selected[key] = [value[row] for row in rows]
    return cast(GeneratorOutput, selected)


def concatenate_generator_outputs(outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Join the rows of all outputs.

    Metrics of responses and rewards are computed again over all rows. Other metrics are reduced by their names: mean
    for ``avg``, ``mean``, ``median``, ``std``, percentiles, rates, ratios and those of environments, minimum for
    ``min``, maximum for ``max``, sum for the rest. Raises DataError if only some of the outputs have
    log-probs, routed experts or ``is_last_step``.
    """
    if not outputs:
        raise DataError("there are no generator outputs to join: pass one at least")
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for output in outputs for key in output):
        values: list[Any] = [output.get(key) for output in outputs]
        if key == "rollout_metrics":
            continue
        if all(value is None for value in values):
            joined[key] = None
        elif any(value is None for value in values):
            raise DataError(f"only some of the generator outputs have {key}: all must, or none")
        else:
            joined[key] = [entry for value in values for entry in value]
    metrics = _join_metrics([output.get("rollout_metrics") or {} for output in outputs])
    rewards = rewards_of_rows(cast(GeneratorOutput, joined))
    fresh = get_rollout_metrics(joined["response_ids"], rewards, loss_masks=joined["loss_masks"])
    joined["rollout_metrics"] = {**metrics, **fresh}
    return cast(GeneratorOutput, joined)


def _join_metrics(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for some in metrics for name in some):
        values = [some[name] for some in metrics if isinstance(some.get(name), int | float)]
        if not values:
            continue
        averaged = name.endswith(("_rate", "_ratio")) or name.startswith("environment/")
        if averaged or any(part in name for part in ("avg", "mean", "median", "std", "p90", "p99")):
            joined[name] = sum(values) / len(values)
        elif "min" in name:
            joined[name] = min(values)
        else:
            joined[name] = max(values) if "max" in name else sum(values)
    return joined


def validate_generator_output(output: GeneratorOutput, num_trajectories: int | None = None) -> None:
    """Raise DataError if lists have different lengths or ``is_last_step`` does not match the order of the rows.

    The rows of a trajectory must be adjacent and end with its last step.
    """
    rows = len(output["response_ids"])
    if not rows:
        raise DataError("the generator returned no rows: it must return one for each trajectory at least")
    steps = output.get("is_last_step")
    if num_trajectories is not None and steps is None and rows != num_trajectories:
        raise DataError(
            f"the generator returned {rows} rows for {num_trajectories} trajectories: return one for each, or "
            "is_last_step if a trajectory has several"
        )
    lists = ("prompt_token_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids")
    for key in (*lists, "rollout_support"):
        value: Any = output.get(key)
        if value is not None and len(value) != rows:
            raise DataError(f"the generator returned {len(value)} {key} for {rows} rows: return one for each row")
    kinds = {has_token_rewards(reward) for reward in output["rewards"]}
    if len(kinds) > 1:
        raise DataError("rewards must be all numbers or all lists; the generator returned both")
    if steps is not None:
        _check_steps(output, num_trajectories)


def _check_steps(output: GeneratorOutput, num_trajectories: int | None) -> None:
    steps, ids = output["is_last_step"], output.get("trajectory_ids")
    assert steps is not None
    if ids is None or len(steps) != len(output["response_ids"]):
        raise DataError("step-wise rows need trajectory_ids and is_last_step for every row: return both")
    if num_trajectories is not None and sum(steps) != num_trajectories:
        raise DataError(
            f"{sum(steps)} rows are marked as last steps for {num_trajectories} trajectories: mark one of each"
        )
    for row, last in enumerate(steps):
        following = ids[row + 1] if row + 1 < len(ids) else None
        if last == (following == ids[row]):
            raise DataError(
                f"row {row} of trajectory {ids[row].to_string()}: is_last_step={last} does not match its"
                " position: the rows of a trajectory must be adjacent, and only the last one has is_last_step=True"
            )


def reward_parts(output: GeneratorOutput, names: Sequence[str]) -> torch.Tensor:
    """Return the metrics ``names`` of each row's environment, [rows, names] float32; 0 in rows that failed.

    Raises DataError if an environment does not report one of them as a finite number.
    """
    rows = len(output["response_ids"])
    measured, errors = output.get("env_metrics") or [{}] * rows, output.get("errors") or [None] * rows
    last = output.get("is_last_step") or [True] * rows
    parts = torch.zeros(rows, len(names))
    for row, (metrics, error, is_last) in enumerate(zip(measured, errors, last, strict=True)):
        for column, name in enumerate(names if error is None and is_last else ()):
            value = metrics.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise DataError(
                    f"trainer.algorithm.gdpo_weights: the environment of a row reports {name}={value!r}, not a finite "
                    f"number: return it from get_metrics(), which has {', '.join(metrics) or 'nothing'}"
                )
            parts[row, column] = float(value)
    return parts


def observation_mask(output: GeneratorOutput, batch: TrainingBatch) -> torch.Tensor:
    """Return [R] bool: the response tokens of ``batch`` that were not sampled, except in rows that failed.

    Which tokens were sampled is known from ``rollout_versions``, else from the loss masks of the generator.
    """
    spans, mask = output.get("rollout_versions"), batch.response_mask.clone()
    for row, first in enumerate(batch.responses.starts.tolist()):
        if spans is None:
            sampled = np.asarray(output["loss_masks"][row]).astype(bool, copy=False)
            mask[first : first + len(sampled)] &= ~torch.from_numpy(sampled)
        for _, begin, end in spans[row] if spans is not None else ():
            mask[first + begin : first + end] = False
    return mask


def to_training_batch(output: GeneratorOutput, uids: Sequence[str]) -> TrainingBatch:
    """Make the training batch from the rows; ``uids`` [rows] are those of the prompts.

    The rows of a trajectory that failed get a separate uid and masks of 0, so that it affects neither the baseline of
    its prompt nor any mean. Raises DataError for an invalid output.
    """
    validate_generator_output(output)
    failed = {row for trajectory in sampled_trajectories(output, uids) if trajectory.failed for row in trajectory.rows}
    batch = collate(
        output["prompt_token_ids"],
        output["response_ids"],
        uids=[failed_uid(uid, row) if row in failed else uid for row, uid in enumerate(uids)],
        rewards=output["rewards"],
        loss_masks=output["loss_masks"],
        rollout_logprobs=output["rollout_logprobs"],
        rollout_routes=output.get("rollout_expert_indices"),
        is_last_step=output.get("is_last_step"),
        rollout_support=output.get("rollout_support"),
    )
    if (reasons := output.get("stop_reasons")) is not None:
        batch.truncated = torch.tensor([reason in CUT_OFF for reason in reasons])
    responses = batch.responses
    for row in failed:
        for mask in (batch.response_mask, batch.loss_mask):
            mask[responses.of(row)] = False
    return batch
