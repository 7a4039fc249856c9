"""The batch of a step as it was at 062ad5f4: dense tensors, padded to the longest row, split and put for each call.

The opponent of ``control_plane.py``. Copied from types.py, data/{batch,packing}.py, algorithms/{advantages,groups,
masked,metrics}.py, trainer/step_batch.py and workers/dispatch.py of that commit, without what a step of GRPO with a
reference does not call. Nothing here follows the project any more.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

type TokenValues = Sequence[Any] | np.ndarray
CHECK_BLOCK, EPSILON = 1 << 20, 1e-6


# ---------------------------------------------------------------------- types.py
@dataclass(slots=True)
class TrainingBatch:
    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    uids: list[str] = field(default_factory=list)
    rewards: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    rollout_routes: list[np.ndarray | None] = field(default_factory=list)

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.attention_mask.sum(dim=1, dtype=torch.int64).numpy(force=True)
        return lengths

    def select(self, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
        index = torch.as_tensor(np.asarray(rows, dtype=np.int64))
        picked: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = value[index.to(value.device)]
            elif isinstance(value, list):
                value = [value[row] for row in index.tolist()] if value else []
            picked[item.name] = value
        return TrainingBatch(**picked)

    def blank_row(self) -> TrainingBatch:
        blank: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                blank[item.name] = value.new_zeros(1, *value.shape[1:])
        routes: list[np.ndarray | None] = [None] if self.rollout_routes else []
        return TrainingBatch(**blank, uids=[""] if self.uids else [], rollout_routes=routes)


# ---------------------------------------------------------------------- data/batch.py
def collate(
    prompts: Sequence[TokenValues],
    responses: Sequence[TokenValues],
    *,
    uids: Sequence[str],
    rewards: Sequence[float],
    loss_masks: Sequence[TokenValues],
    rollout_logprobs: Sequence[TokenValues],
    rollout_routes: Sequence[np.ndarray | None] | None = None,
) -> TrainingBatch:
    before, lengths = _lengths(prompts), _lengths(responses)
    total = before + lengths
    width, response_width = int(total.max(initial=1)), int(lengths.max(initial=1))
    for values in (loss_masks, rollout_logprobs):
        assert np.array_equal(_lengths(values), lengths)
    sequences = torch.zeros(len(total), width, dtype=torch.int64)
    _fill(sequences.numpy(), prompts, width - total)
    _fill(sequences.numpy(), responses, width - lengths)
    return TrainingBatch(
        sequences=sequences,
        attention_mask=_filled(total, width, torch.bool),
        response_mask=_filled(lengths, response_width, torch.float32),
        loss_mask=_right_aligned(loss_masks, lengths, response_width),
        uids=list(uids),
        rewards=_rewards(rewards, lengths, response_width),
        rollout_logprobs=_right_aligned(rollout_logprobs, lengths, response_width),
        rollout_routes=_routes(rollout_routes or ()),
    )


def _lengths(rows: Sequence[TokenValues]) -> np.ndarray:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def _fill(out: np.ndarray, rows: Sequence[TokenValues], starts: np.ndarray) -> None:
    for line, row, start in zip(out, rows, starts.tolist(), strict=True):
        if n := len(row):
            line[start : start + n] = row


def _right_aligned(rows: Sequence[TokenValues], lengths: np.ndarray, width: int) -> Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.float32)
    _fill(out.numpy(), rows, width - lengths)
    return out


def _filled(lengths: np.ndarray, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(len(lengths), width, dtype=dtype)
    for line, length in zip(out.numpy(), lengths.tolist(), strict=True):
        line[width - length :] = 1
    return out


def _rewards(rewards: Sequence[float], lengths: np.ndarray, width: int) -> Tensor:
    out = torch.zeros(len(rewards), width, dtype=torch.float32)
    out[:, -1] = torch.tensor(np.asarray(rewards, dtype=np.float32) * (lengths > 0))
    return out


def _routes(routes: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    recorded = [given for given in routes if given is not None]
    if not recorded:
        return []
    largest = max(int(given.max(initial=0)) for given in recorded)
    return [None if given is None else given.astype(np.min_scalar_type(largest), copy=False) for given in routes]


# ---------------------------------------------------------------------- data/packing.py
def mini_batches(batch: TrainingBatch, prompts: int) -> list[TrainingBatch]:
    ends = []
    row = 0
    for number, (_, rows) in enumerate(groupby(batch.uids), 1):
        row += len(list(rows))
        if number % prompts == 0:
            ends.append(row)
    if not ends or ends[-1] != row:
        ends.append(row)
    if len(ends) == 1:
        return [batch]
    starts = [0, *ends[:-1]]
    return [batch.select(range(start, end)) for start, end in zip(starts, ends, strict=True)]


def rows_with_trained_tokens(batch: TrainingBatch) -> TrainingBatch:
    rows = batch.loss_mask.any(dim=1).nonzero().flatten()
    return batch.select(rows.numpy()) if 0 < len(rows) < len(batch) else batch


def parts_with_trained_tokens(parts: list[TrainingBatch]) -> list[TrainingBatch]:
    return [part for part in parts if part.loss_mask.any()] or parts


def split_for_dp(costs: np.ndarray, dp: int) -> list[np.ndarray]:
    if len(costs) < dp:
        raise ValueError(f"{len(costs)} sequences for {dp} data-parallel ranks: each needs at least one")
    if dp == 1:
        return [np.arange(len(costs))]
    return balance(costs, dp, equal_counts=len(costs) % dp == 0)


def balance(costs: np.ndarray, k: int, *, equal_counts: bool = False) -> list[np.ndarray]:
    costs = np.asarray(costs, dtype=np.float64)
    capacity, extra = divmod(len(costs), k) if equal_counts else (len(costs), 0)
    groups: list[list[int]] = [[] for _ in range(k)]
    lightest = [(0.0, group) for group in range(k)]
    values = costs.tolist()
    for row in np.argsort(-costs, kind="stable").tolist():
        weight, group = lightest[0]
        groups[group].append(row)
        full = equal_counts and len(groups[group]) >= capacity
        if full and len(groups[group]) == capacity and extra:
            extra -= 1
            full = False
        if full:
            heapq.heappop(lightest)
        else:
            heapq.heapreplace(lightest, (weight + values[row], group))
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]


# ---------------------------------------------------------------------- algorithms
def check_mask(name: str, mask: Tensor) -> None:
    if mask.max() <= 1 and all(torch.equal(part * part, part) for part in torch.split(mask.flatten(), CHECK_BLOCK)):
        return
    raise ValueError(f"{name} must hold 0 and 1 only")


def finite_samples(batch: TrainingBatch) -> Tensor:
    keep = torch.ones(len(batch), dtype=torch.bool)
    for values, mask in ((batch.rewards, None), (batch.rollout_logprobs, batch.loss_mask)):
        assert values is not None
        considered = values if mask is None else torch.where(mask > 0, values, 0.0)
        if not bool(considered.sum().isfinite()):
            keep &= considered.isfinite().all(dim=1)
    return keep


def grpo_scores(scores: Tensor, index: Sequence[str]) -> Tensor:
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(index))}
    ids = torch.from_numpy(np.fromiter(map(numbers.__getitem__, index), np.int64, len(index)))
    sizes = torch.bincount(ids, minlength=len(numbers)).double()
    alone = sizes == 1
    mean = torch.bincount(ids, weights=scores.double(), minlength=len(sizes)) / sizes
    deviations = scores.double() - mean.masked_fill(alone, 0.0)[ids]
    squares = torch.bincount(ids, weights=deviations.masked_fill(alone[ids], 0.0) ** 2, minlength=len(sizes))
    std = (squares / (sizes - 1).clamp(min=1)).sqrt().masked_fill(alone, 1.0)
    return (deviations / (std + EPSILON)[ids]).to(scores.dtype)


@torch.no_grad()
def compute_advantages_and_returns(
    token_level_rewards: Tensor, response_mask: Tensor, loss_mask: Tensor, index: Sequence[str]
) -> tuple[Tensor, Tensor]:
    check_mask("response_mask", response_mask)
    check_mask("loss_mask", loss_mask)
    assert bool(token_level_rewards.sum().isfinite())
    advantages = grpo_scores(token_level_rewards.sum(dim=1), index)[:, None] * response_mask
    return advantages, advantages


def token_mean(values: Tensor, mask: Tensor) -> float:
    kept = torch.where(mask > 0, values.double(), 0.0)
    return float(kept.sum() / (mask > 0).sum().double())


def logprob_diff_metrics(batch: TrainingBatch) -> dict[str, float]:
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    values = (batch.old_logprobs - batch.rollout_logprobs).abs().double()
    valid = batch.loss_mask > 0
    return {
        "mean": token_mean(values, batch.loss_mask),
        "square_mean": token_mean(values * values, batch.loss_mask),
        "min": float(torch.where(valid, values, math.inf).amin()),
        "max": float(torch.where(valid, values, -math.inf).amax()),
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    assert batch.advantages is not None and batch.rewards is not None
    advantages = batch.advantages[batch.loss_mask > 0]
    return {
        "loss/avg_final_rewards": batch.rewards.sum(dim=1).mean().item(),
        "loss/avg_raw_advantages": advantages.mean().item() if len(advantages) else 0.0,
        "loss/avg_raw_advantages_abs": advantages.abs().mean().item() if len(advantages) else 0.0,
    }


def has_signal(batch: TrainingBatch) -> bool:
    """The part of ``missing_signal`` that an ordinary batch reaches."""
    assert batch.advantages is not None
    return bool((batch.loss_mask > 0).any()) and bool(torch.any((batch.advantages != 0) & (batch.loss_mask > 0)))


# ---------------------------------------------------------------------- workers/dispatch.py
@dataclass(frozen=True, slots=True)
class ShardedBatch:
    rows: list[np.ndarray]
    chunks: list[Any]
    size: int

    def collect(self, results: Sequence[np.ndarray]) -> Tensor:
        """``results``: those of the rank of each replica that collects."""
        out = np.zeros((self.size, *results[0].shape[1:]), results[0].dtype)
        for replica_rows, result in zip(self.rows, results, strict=True):
            out[replica_rows] = result[: len(replica_rows)]
        return torch.from_numpy(out)


def dispatch(batch: TrainingBatch, dp_size: int, flops: Callable[[np.ndarray], np.ndarray]) -> ShardedBatch:
    size = len(batch)
    if size < dp_size:
        batch = _with_blank_rows(batch, dp_size - size)
    rows = [np.sort(part) for part in split_for_dp(flops(batch.lengths), dp_size)]
    chunks = [ray.put(to_arrays(batch if dp_size == 1 else batch.select(part))) for part in rows]
    return ShardedBatch([part[part < size] for part in rows], chunks, size)


def _with_blank_rows(batch: TrainingBatch, rows: int) -> TrainingBatch:
    blank = batch.blank_row()
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(batch):
        value, empty = getattr(batch, item.name), getattr(blank, item.name)
        if isinstance(value, Tensor):
            value = torch.cat([value, *[empty] * rows])
        elif isinstance(value, list):
            value = [*value, *list(empty) * rows]
        fields[item.name] = value
    return TrainingBatch(**fields)


def to_arrays(batch: TrainingBatch) -> dict[str, Any]:
    fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()}


def from_arrays(arrays: dict[str, Any]) -> TrainingBatch:
    fields: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    return TrainingBatch(**fields)
