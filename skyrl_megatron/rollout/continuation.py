"""A turn that is sampled in several requests: the later ones continue after the tokens of the earlier ones.

The tokens of a turn keep the log-probs, versions, routes and support with which they were sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_megatron.errors import DataError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.types import TokenSupport, joined_arrays


@dataclass(slots=True)
class BegunTurn:
    """The beginning of a turn."""

    prompt: np.ndarray
    """[p] int32: the turn's prompt."""
    generation: Generation
    """What is sampled so far."""


RESTARTS = ("structured_outputs", "presence_penalty", "frequency_penalty", "repetition_detection")
"""Sampling keys whose effect depends on all tokens of a turn: an engine cannot continue such a turn."""


def may_continue(sampling: Mapping[str, Any]) -> bool:
    """Return whether a turn may be sampled in several requests."""
    return not any(sampling.get(key) for key in RESTARTS)


def continued(part: Generation | None, generation: Generation, prompt: int) -> Generation:
    """Join the beginning of a turn and its continuation. ``prompt``: tokens of the turn's prompt."""
    if part is None:
        return generation
    if not generation.token_ids:
        return dataclasses.replace(part, finish_reason=generation.finish_reason)
    length = len(part.token_ids)
    versions = list(part.versions)
    for name, start, end in generation.versions:
        if versions and versions[-1][0] == name and versions[-1][2] == start + length:
            versions[-1] = (name, versions[-1][1], end + length)
        else:
            versions.append((name, start + length, end + length))
    support = None
    if part.support is not None and generation.support is not None:
        support = TokenSupport.joined([part.support, generation.support])
    complete = len(part.logprobs) == length and len(generation.logprobs) == len(generation.token_ids)
    return Generation(
        token_ids=[*part.token_ids, *generation.token_ids],
        logprobs=[*part.logprobs, *generation.logprobs] if complete else [],
        finish_reason=generation.finish_reason,
        versions=versions,
        routed_experts=_joined_routes(part.routed_experts, generation, prompt + length),
        support=support,
    )


def _joined_routes(routes: Any, generation: Generation, start: int) -> Any:
    """Return the routes of a turn, given those of its beginning; ``start``: tokens before the continuation.

    The routes of a token are those of the pass that sampled after it. The continuation computed the last token before
    it and its own tokens but the last one.
    """
    if routes is None or generation.routed_experts is None:
        return None
    later = generation.routed_experts
    needed = len(generation.token_ids)
    if len(later) < needed:
        raise DataError(
            f"the engine returned routed experts of {len(later)} tokens, but the turn after {start} tokens needs"
            f" {needed}"
        )
    return joined_arrays([routes, later[len(later) - needed :]])


def without_open_stop(part: Generation, text_of: Callable[[Sequence[int]], str], stop: Sequence[str]) -> Generation:
    """Return the beginning of a turn without the last tokens that may belong to a stop string: an engine looks for it
    only in what it samples itself."""
    count = len(part.token_ids)
    begun = [each[:length] for each in stop for length in range(1, len(each))]
    while count and any(text_of(part.token_ids[:count]).endswith(each) for each in begun):
        count -= 1
    return first_tokens(part, count)


def first_tokens(part: Generation, count: int) -> Generation:
    """Return the first ``count`` tokens of a generation, with what belongs to them."""
    dropped = len(part.token_ids) - count
    if not dropped:
        return part
    routes = part.routed_experts
    spans = ((name, start, min(end, count)) for name, start, end in part.versions)
    return dataclasses.replace(
        part,
        token_ids=part.token_ids[:count],
        logprobs=part.logprobs[:count],
        versions=[(name, start, end) for name, start, end in spans if start < end],
        routed_experts=None if routes is None else routes[: len(routes) - dropped],
        support=None if part.support is None else part.support.first(count),
    )


def remaining(keys: Mapping[str, Any], part: Generation) -> Mapping[str, Any]:
    """Return the sampling keys of a request that continues ``part``."""
    counted = {key: keys[key] - len(part.token_ids) for key in ("max_tokens", "min_tokens") if keys.get(key)}
    return {**keys, **{key: max(count, 0) for key, count in counted.items()}}


def at_most(keys: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """Return the sampling keys with ``tokens`` as upper limit of ``max_tokens`` and ``min_tokens``."""
    lower = {key: min(keys[key], tokens) for key in ("max_tokens", "min_tokens") if keys.get(key)}
    return {**keys, **lower}
