"""Merging the rows of step-wise trajectories where one continues the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np

from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.interface import GeneratorOutput, Tokens
from skyrl_megatron.types import TokenSupport


def merge_stepwise_output(output: GeneratorOutput) -> GeneratorOutput:
    """Join neighbouring rows of a trajectory where prompt and response of the first begin the prompt of the second.

    What the second prompt has beyond that becomes part of the response, masked.

    ``stop_reasons``, ``env_metrics``, ``errors`` and ``is_last_step`` are those of the last row that was joined.
    Raises DataError for routes, which are not joined, and for rows that are not step-wise.
    """
    if any(routes is not None for routes in output.get("rollout_expert_indices") or ()):
        raise DataError("generator.merge_stepwise_output cannot join routes: turn off enable_return_routed_experts")
    ids, last = output.get("trajectory_ids"), output.get("is_last_step")
    if ids is None or last is None:
        raise DataError("generator.merge_stepwise_output joins step-wise rows only: set step_wise_trajectories=true")
    groups: list[list[int]] = []
    end = np.zeros(0, np.int64)  # prompt and response of the group so far
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
    gaps: dict[int, np.ndarray] = {}  # row → tokens between the row before and its response
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
