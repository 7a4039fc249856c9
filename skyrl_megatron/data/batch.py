"""Collation of samples to the flat tensors of :class:`~skyrl_megatron.types.TrainingBatch`, and the routed experts of
their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError, DataError
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
    """Collate B samples to a batch of N tokens, R of them of responses.

    ``rewards``: one number per sample (assigned to its last response token) or one per token. ``loss_masks``: 0 or 1
    per response token, default 1. ``rollout_routes``: [n, L, K] integers, the experts of the first n tokens of a
    sample including its prompt; None if unknown. ``rollout_support``: the support of a sample's response tokens; None
    if they were sampled from the whole vocabulary.

    Raises ValueError with the first sample whose lengths do not match, AlgorithmError for another value in a mask,
    DataError for a token outside its support.
    """
    lengths = _lengths(responses)
    total = _lengths(prompts) + lengths
    for name, values in {"rewards": rewards, "loss_masks": loss_masks, "rollout_logprobs": rollout_logprobs}.items():
        if values is not None and not (name == "rewards" and _per_sample(rewards)):
            _check_lengths(name, values, lengths, uids)  # type: ignore[arg-type]
    size = int(lengths.sum())
    loss_mask = torch.ones(size, dtype=torch.bool)
    if loss_masks is not None:
        _fill(loss_mask.numpy(), [_checked_mask(mask, row) for row, mask in enumerate(loss_masks)])
    tokens = torch.empty(int(total.sum()), dtype=torch.int32)
    _fill(tokens.numpy(), [part for pair in zip(prompts, responses, strict=True) for part in pair])
    return TrainingBatch(
        tokens=tokens,
        lengths=total,
        response_lengths=lengths,
        response_mask=torch.ones(size, dtype=torch.bool),
        loss_mask=loss_mask,
        uids=list(uids),
        rewards=_rewards(rewards, lengths),
        rollout_logprobs=None if rollout_logprobs is None else _joined(rollout_logprobs, size),
        is_last_step=None if is_last_step is None else torch.tensor(is_last_step, dtype=torch.bool),
        rollout_routes=_routes(rollout_routes or (), total, uids),
        rollout_support=_supports(rollout_support or (), responses, uids),
    )


def refuse_mask(name: str, value: float, row: int, token: int) -> NoReturn:
    """Raise AlgorithmError for a ``value`` of a mask that is neither 0 nor 1."""
    raise AlgorithmError(
        f"{name} must hold 0 and 1 only, found {value:g} in row {row}, token {token}: weights of tokens belong into "
        "the advantages"
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
        if not isinstance(support.ids, np.ndarray):  # the engine has checked it
            continue
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


def _fill(out: np.ndarray, rows: Sequence[TokenValues]) -> None:
    """Copy the rows one after another, with one contiguous copy per row."""
    start = 0
    for row in rows:
        end = start + len(row)
        out[start:end] = row
        start = end


def _joined(rows: Sequence[TokenValues], size: int) -> Tensor:
    """Return the values of all rows, [R] float32. ``size``: R."""
    out = torch.empty(size, dtype=torch.float32)
    _fill(out.numpy(), rows)
    return out


def _checked_mask(mask: TokenValues, row: int) -> np.ndarray:
    """Return a mask as bool, which keeps no other value than 0 and 1."""
    values = np.asarray(mask)
    if values.dtype != bool and (other := np.flatnonzero((values != 0) & (values != 1))).size:
        refuse_mask("loss_mask", values[other[0]], row, int(other[0]))
    return values.astype(bool, copy=False)


def _rewards(rewards: Sequence[Any], lengths: np.ndarray) -> Tensor:
    if not _per_sample(rewards):
        return _joined(rewards, int(lengths.sum()))
    out = torch.zeros(int(lengths.sum()), dtype=torch.float32)
    some = lengths > 0
    out.numpy()[(np.cumsum(lengths) - 1)[some]] = np.asarray(rewards, dtype=np.float32)[some]
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
    arrays = [recorded for recorded in routes if isinstance(recorded, np.ndarray)]
    narrowest = np.min_scalar_type(max((int(recorded.max(initial=0)) for recorded in arrays), default=0))
    # those of the run's engines are narrow already
    return [
        recorded.astype(narrowest, copy=False) if isinstance(recorded, np.ndarray) else recorded for recorded in routes
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
