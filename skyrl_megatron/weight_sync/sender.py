"""The sending side of a weight update, in a trainer rank: every rank sends the tensors it owns, bucket by bucket.

Order of a sync, driven from outside (engines and ranks are told concurrently)::

    once:   sender.metadata() of every rank, sender.connect(…) ‖ engine.connect_weights(…)
    each:   engine.pause → engine.start_update → engine.update(metadata) ‖ sender.send() of every rank
            → engine.finish_update(version) → checksums of both sides compared → engine.resume

A rank's broadcasts wait for the receivers, which take the senders one after the other in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import (
    DEFAULT_BUCKET_BYTES,
    TensorMeta,
    checksum,
    plan_buckets,
    write_tensor,
)
from skyrl_megatron.weight_sync.transport_gloo import GlooTransport

Source = Callable[[], Iterable[tuple[str, Tensor]]]
"""Makes a fresh pass over (HF name, whole tensor); iterating may be a collective among trainer ranks."""


class WeightSender:
    """Sends what ``source`` yields. The names, shapes and order of a pass must not change between syncs."""

    def __init__(self, source: Source, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.source, self.bucket_bytes = source, bucket_bytes
        self._metadata: list[TensorMeta] | None = None
        self._transport: GlooTransport | None = None

    def metadata(self) -> list[TensorMeta]:
        """What this rank will send, in order. The first call makes a pass over the source: all ranks call together."""
        if self._metadata is None:
            self._metadata = [
                TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in self.source()
            ]
        return self._metadata

    def connect(self, host: str, port: int, receivers: int, timeout_s: float = 120.0) -> None:
        """Open this rank's group and wait for its receivers (worker ranks of all engines)."""
        self._transport = GlooTransport(host, port, 0, receivers + 1, timeout_s)

    def send(self) -> list[int]:
        """Send every bucket; returns their checksums. Raises WeightSyncError when the source is not as declared."""
        assert self._transport is not None, "connect() first"
        metadata, sums = self.metadata(), []
        tensors = iter(self.source())
        for bucket in plan_buckets(metadata, self.bucket_bytes):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for meta, offset in zip(metadata[bucket.first : bucket.last], bucket.offsets, strict=True):
                name, tensor = next(tensors, ("nothing", torch.empty(0)))
                if name != meta.name or tuple(tensor.shape) != meta.shape:
                    raise WeightSyncError(
                        f"the model yields {name} {tuple(tensor.shape)} where {meta.name} {meta.shape} was announced"
                    )
                write_tensor(buffer, offset, tensor)
            sums.append(checksum(buffer))
            self._transport.broadcast(buffer)
        return sums
