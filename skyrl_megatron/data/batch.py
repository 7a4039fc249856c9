"""Collation of samples to the right-aligned tensors of :class:`~skyrl_megatron.types.TrainingBatch`, and the routed
experts of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import DataError
from skyrl_megatron.types import TokenSupport, TrainingBatch

type TokenValues = Sequence[Any] | np.ndarray
"""One value per token of a sample. Copying arrays is fast; lists are copied element by element."""


def collate(
    prompts: Sequence[TokenValues],
    responses: Sequence[TokenValues],
    *,
    uids: Sequence[str],
    rewards: Sequence[TokenValues] | Sequence[float],
    loss_masks: Sequence[TokenValues] | None = None,
    rollout_logprobs: Sequence[TokenValues] | None = None,
    rollout_routes: Sequence[np.ndarray | None] | None = None,
    is_last_step: Sequence[bool] | None = None,
    rollout_support: Sequence[TokenSupport | None] | None = None,
) -> TrainingBatch:
    """Collate B samples to a batch: S is the longest prompt + response, T the longest response (at least 1).

    ``rewards``: one number per sample (assigned to its last response token) or one per token. ``loss_masks``: 0 or 1
    per response token, default 1. ``rollout_routes``: [n, L, K] integers, the experts of the first n tokens of a
    sample including its prompt; None if unknown. ``rollout_support``: the support of a sample's response tokens; None
    if they were sampled from the whole vocabulary.

    Raises ValueError with the first sample whose lengths do not match, DataError for a token outside its support.
    """
    before, lengths = _lengths(prompts), _lengths(responses)
    total = before + lengths
    width, response_width = int(total.max(initial=1)), int(lengths.max(initial=1))
    for name, values in {"rewards": rewards, "loss_masks": loss_masks, "rollout_logprobs": rollout_logprobs}.items():
        if values is not None and not (name == "rewards" and _per_sample(rewards)):
            _check_lengths(name, values, lengths, uids)  # type: ignore[arg-type]
    sequences = torch.zeros(len(total), width, dtype=torch.int64)
    _fill(sequences.numpy(), prompts, width - total)
    _fill(sequences.numpy(), responses, width - lengths)
    response_mask = _filled(lengths, response_width, torch.float32)
    return TrainingBatch(
        sequences=sequences,
        attention_mask=_filled(total, width, torch.bool),
        response_mask=response_mask,
        loss_mask=response_mask.clone() if loss_masks is None else _right_aligned(loss_masks, lengths, response_width),
        uids=list(uids),
        rewards=_rewards(rewards, lengths, response_width),
        rollout_logprobs=(
            None if rollout_logprobs is None else _right_aligned(rollout_logprobs, lengths, response_width)
        ),
        is_last_step=None if is_last_step is None else torch.tensor(is_last_step, dtype=torch.bool),
        rollout_routes=_routes(rollout_routes or (), total, uids),
        rollout_support=_supports(rollout_support or (), responses, uids),
    )


def failed_uid(uid: str, row: int) -> str:
    """Return a separate uid for a failed row, so that it does not belong to the group of its prompt."""
    return f"{uid}/failed-{row}"


def _supports(
    supports: Sequence[TokenSupport | None], responses: Sequence[TokenValues], uids: Sequence[str]
) -> list[TokenSupport]:
    """Return the support of each sample; [] if no sample has one."""
    if all(support is None for support in supports):
        return []
    made = [TokenSupport.none(len(r)) if s is None else s for s, r in zip(supports, responses, strict=True)]
    _check_lengths("rollout_support", made, _lengths(responses), uids)  # type: ignore[arg-type]
    for uid, support, response in zip(uids, made, responses, strict=True):
        if (position := support.without(np.asarray(response))) is not None:
            raise DataError(
                f"uid {uid}: token {int(response[position])} at position {position} of the response is not in the "
                f"support it was sampled from ({support.counts[position]} tokens), where its probability would be 0: "
                "fix the engine's mask, or set generator.inference_engine.return_sampling_support=false"
            )
    return made


def _per_sample(rewards: Sequence[Any]) -> bool:
    return len(rewards) > 0 and np.ndim(rewards[0]) == 0


def _lengths(rows: Sequence[TokenValues]) -> np.ndarray:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def _check_lengths(name: str, rows: Sequence[TokenValues], lengths: np.ndarray, uids: Sequence[str]) -> None:
    found = _lengths(rows)
    if len(found) != len(lengths):
        raise ValueError(f"{len(found)} {name} for {len(lengths)} samples: the generator must return one for each")
    if (wrong := np.flatnonzero(found != lengths)).size:
        row = int(wrong[0])
        raise ValueError(
            f"sample {row} (uid {uids[row]}): {found[row]} {name} for {lengths[row]} response tokens: the generator "
            "must return one for each"
        )


def _fill(out: np.ndarray, rows: Sequence[TokenValues], starts: np.ndarray) -> None:
    """Copy each row to its position, with one contiguous copy per row."""
    for line, row, start in zip(out, rows, starts.tolist(), strict=True):
        if n := len(row):
            line[start : start + n] = row


def _right_aligned(rows: Sequence[TokenValues], lengths: np.ndarray, width: int) -> Tensor:
    """Return [B, width] float32 with right-aligned rows and zeros on the left."""
    out = torch.zeros(len(rows), width, dtype=torch.float32)
    _fill(out.numpy(), rows, width - lengths)
    return out


def _filled(lengths: np.ndarray, width: int, dtype: torch.dtype) -> Tensor:
    """Return [B, width] with ones in the last ``lengths`` columns of each row."""
    out = torch.zeros(len(lengths), width, dtype=dtype)
    for line, length in zip(out.numpy(), lengths.tolist(), strict=True):
        line[width - length :] = 1
    return out


def _rewards(rewards: Sequence[Any], lengths: np.ndarray, width: int) -> Tensor:
    if not _per_sample(rewards):
        return _right_aligned(rewards, lengths, width)
    out = torch.zeros(len(rewards), width, dtype=torch.float32)
    out[:, -1] = torch.tensor(np.asarray(rewards, dtype=np.float32) * (lengths > 0))
    return out


def _routes(routes: Sequence[np.ndarray | None], total: np.ndarray, uids: Sequence[str]) -> list[np.ndarray | None]:
    """Return the routes of each sample in the narrowest integer type; [] if no sample has any."""
    shape = next((recorded.shape[1:] for recorded in routes if recorded is not None), None)
    if shape is None:
        return []
    for row, recorded in enumerate(routes):
        if recorded is not None and (len(recorded) > total[row] or recorded.shape[1:] != shape):
            raise ValueError(
                f"sample {row} (uid {uids[row]}): routes of shape {recorded.shape} for {total[row]} tokens,"
                f" others have {shape} a token"
            )
    largest = max(int(recorded.max(initial=0)) for recorded in routes if recorded is not None)
    return [
        None if recorded is None else recorded.astype(np.min_scalar_type(largest), copy=False) for recorded in routes
    ]


PREFIX = "routes."


def recorded_name(layer: int) -> str:
    """Return the name under which the routes of a layer are recorded (``runtime/recording.py``)."""
    return f"{PREFIX}{layer}"


def recorded_layers(found: Mapping[str, np.ndarray]) -> list[int]:
    """Return the layers with recorded routes, [n, K] each, by their names."""
    return sorted(int(name.removeprefix(PREFIX)) for name in found if name.startswith(PREFIX))


def routes_of(found: Mapping[str, np.ndarray], layers: int) -> np.ndarray | None:
    """Return the routes of a row, [n, ``layers``, K] uint8/uint16, 0 in layers without router; None if unknown."""
    routed = recorded_layers(found)
    if not routed:
        return None
    each = np.stack([found[recorded_name(layer)] for layer in routed], 1)
    whole = np.zeros((len(each), layers, each.shape[2]), np.min_scalar_type(max(int(each.max(initial=0)), 0)))
    whole[:, routed] = each
    return whole
