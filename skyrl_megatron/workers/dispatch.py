"""Split a batch over the data-parallel replicas of a role, and collect results in the order of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from skyrl_megatron.data.splitting import TOGETHER, rows_by_adapter, split_for_dp, split_units, units
from skyrl_megatron.runtime.flops import ModelFlops
from skyrl_megatron.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The position of a rank in its role's layout, and its process."""

    dp_rank: int
    dp_size: int
    collects: bool
    """Whether it returns the results of its replica: tp 0, cp 0, last pipeline stage."""
    pid: int
    node: str
    layers: str = ""
    """On a GPU, the library of its model's layers; empty on CPU."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The chunks of a batch in Ray's object store, one per replica. It may be used for several calls."""

    rows: list[np.ndarray]
    """Rows of the batch in each chunk."""
    chunks: list[Any]
    """Reference to each chunk."""
    size: int

    def arguments(self, ranks: Sequence[RankInfo]) -> list[tuple[Any]]:
        """Return the chunk of each rank."""
        return [(self.chunks[rank.dp_rank],) for rank in ranks]

    def collect(self, ranks: Sequence[RankInfo], results: Sequence[np.ndarray | None]) -> Tensor:
        """Return [B, …] in the order of the batch, from the ranks that collect."""
        out: np.ndarray | None = None
        for rank, result in zip(ranks, results, strict=True):
            if rank.collects:
                assert result is not None
                if out is None:
                    out = np.zeros((self.size, *result.shape[1:]), result.dtype)
                replica_rows = self.rows[rank.dp_rank]
                out[replica_rows] = result[: len(replica_rows)]
        assert out is not None, "no rank collects"
        return torch.from_numpy(out)

    def collect_recorded(
        self, ranks: Sequence[RankInfo], results: Sequence[Mapping[str, Mapping[int, np.ndarray]] | None]
    ) -> list[dict[str, np.ndarray]]:
        """Return the recorded values of each row by name, [n, …] of its n tokens, int32 or float32, from the ranks of
        all pipeline stages."""
        recorded: list[dict[str, np.ndarray]] = [{} for _ in range(self.size)]
        for rank, result in zip(ranks, results, strict=True):
            replica_rows = self.rows[rank.dp_rank]
            for name, by_row in (result or {}).items():
                for row, value in by_row.items():
                    if row < len(replica_rows):  # the rest is padding
                        recorded[replica_rows[row]][name] = value
        return recorded


def dispatch(batch: TrainingBatch, dp_size: int, flops: ModelFlops) -> ShardedBatch:
    """Split ``batch`` over ``dp_size`` replicas, balanced by FLOPs, and put each chunk into the object store once.

    The rows of each adapter are split separately, those of a uid with ``TOGETHER`` not at all. If there are fewer rows
    than replicas, blank rows without weight are added.
    """
    size, names = len(batch), list(dict.fromkeys(batch.adapters)) or [""]
    if batch.metadata.get(TOGETHER):
        batch = _filled(batch, max(dp_size - len(units(batch)), 0), names[0])
        rows = split_units(batch, flops.forward(batch.lengths), dp_size)
    else:
        for name, adapter_rows in rows_by_adapter(batch, names).items():
            if len(adapter_rows) < dp_size:
                batch = _filled(batch, dp_size - len(adapter_rows), name)
        costs = flops.forward(batch.lengths)
        split = [
            [adapter_rows[part] for part in split_for_dp(costs[adapter_rows], dp_size)]
            for adapter_rows in rows_by_adapter(batch, names).values()
        ]
        rows = [np.sort(np.concatenate(parts)) for parts in zip(*split, strict=True)]
    chunks = [ray.put(to_arrays(batch if dp_size == 1 else batch.select(replica_rows))) for replica_rows in rows]
    return ShardedBatch([replica_rows[replica_rows < size] for replica_rows in rows], chunks, size)


def _filled(batch: TrainingBatch, rows: int, adapter: str) -> TrainingBatch:
    """Append blank rows of an adapter."""
    if not rows:
        return batch
    blank = batch.blank_row()
    blank.adapters = [adapter] if batch.adapters else []
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
    """Return the fields of ``batch`` with NumPy arrays, which Ray shares between processes of a node."""
    fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()}


def from_arrays(arrays: dict[str, Any]) -> TrainingBatch:
    """Return the batch of :func:`to_arrays`, with copied tensors."""
    fields: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    return TrainingBatch(**fields)
