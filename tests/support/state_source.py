"""Weights to send without a Megatron model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard, as_rows, dtype_name


class StateSource:
    """A ``WeightSource`` of tensors that one rank has whole, as of a state dict; contents change between syncs."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta(name, dtype_name(t), tuple(t.shape)) for name, t in self.tensors.items()]

    def shards(self) -> Sequence[TensorShard]:
        rows = [as_rows(name, tensor) for name, tensor in self.tensors.items()]
        metadata = zip(self.metadata(), rows, strict=True)
        return [TensorShard(meta, local, (RowRange(0, 0, len(local), 0),)) for meta, local in metadata]

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        shards = self.shards()
        return shards, [0] * len(shards)

    def sends_adapter(self, adapter: str) -> bool:
        return True

    def refresh(self) -> None:
        pass

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors.values()]
