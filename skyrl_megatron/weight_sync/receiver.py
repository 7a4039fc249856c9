"""The receiving side of a weight update, inside an engine's worker process. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_megatron.weight_sync.bucket import TensorMeta, checksum, plan_buckets, read_tensor
from skyrl_megatron.weight_sync.transport_gloo import GlooTransport


@dataclass
class WeightReceiver:
    """One worker's ends of the groups of all senders, in the order in which they are received."""

    transports: Sequence[GlooTransport]
    bucket_bytes: int
    checksums: list[list[int]] = field(default_factory=list)
    """Of the last update: per sender, per bucket."""

    def tensors(self, senders: Sequence[Sequence[TensorMeta]]) -> Iterator[tuple[str, Tensor]]:
        """Receive what every sender announced. Each bucket has a buffer of its own, because loading keeps references
        until a module is whole; checksums are taken before anything is loaded from it."""
        self.checksums = [[] for _ in senders]
        for number, (transport, metadata) in enumerate(zip(self.transports, senders, strict=True)):
            for bucket in plan_buckets(metadata, self.bucket_bytes):
                buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
                transport.broadcast(buffer)
                self.checksums[number].append(checksum(buffer))
                for meta, offset in zip(metadata[bucket.first : bucket.last], bucket.offsets, strict=True):
                    yield meta.name, read_tensor(buffer, offset, meta)
