"""What a trainer rank sends: announced once, iterated in every sync. The shape of vLLM's ``WeightSource``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import Bucket, TensorMeta, as_bytes


class WeightSource(Protocol):
    """Announcement and data must agree item for item: the receivers size their buffers from the announcement."""

    def metadata(self) -> Sequence[TensorMeta]:
        """What a pass yields, in order, without transferring anything."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass over (HF name, tensor on any device). May be a collective among trainer ranks, which then
        iterate in lockstep."""


class PassSource:
    """A function that makes a pass. What it yields is learned from a first pass, made by all ranks together."""

    def __init__(self, make_pass: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._make_pass = make_pass
        self._metadata: list[TensorMeta] | None = None

    def metadata(self) -> Sequence[TensorMeta]:
        if self._metadata is None:
            self._metadata = [TensorMeta(name, dtype_name(t), tuple(t.shape)) for name, t in self._make_pass()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._make_pass())


class StateSource:
    """Tensors that stay where they are, as of a state dict; their contents change between syncs."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta(name, dtype_name(t), tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def dtype_name(tensor: Tensor) -> str:
    """``float32`` of a torch.float32 tensor."""
    return str(tensor.dtype).removeprefix("torch.")


class BucketWriter:
    """One pass over a source, written into its buckets one after the other."""

    def __init__(self, source: WeightSource) -> None:
        self.metadata = source.metadata()
        self._pass = iter(source)
        self._index = -1
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copy the bucket's segments into ``buffer`` ([bucket.nbytes] uint8). Raises WeightSyncError when the source
        yields something else than it announced."""
        for segment in bucket.segments:
            while self._index < segment.index:
                self._next()
            data = self._bytes[segment.start : segment.start + segment.nbytes]
            buffer[segment.offset : segment.offset + segment.nbytes].copy_(data)

    def finish(self) -> None:
        """Raise WeightSyncError when the source yields more than it announced."""
        extra = next(self._pass, None)
        if extra is not None:
            raise WeightSyncError(f"the source yields {extra[0]}, which was not announced")

    def _next(self) -> None:
        self._index += 1
        meta = self.metadata[self._index]
        name, tensor = next(self._pass, ("nothing", torch.empty(0)))
        found, announced = (name, dtype_name(tensor), tuple(tensor.shape)), (meta.name, meta.dtype, meta.part_shape)
        if found != announced:
            raise WeightSyncError(f"the source yields {_text(found)} where {_text(announced)} was announced")
        self._bytes = as_bytes(tensor)


def _text(tensor: tuple[str, str, tuple[int, ...]]) -> str:
    name, dtype, shape = tensor
    return f"{name} ({dtype}, {list(shape)})"
