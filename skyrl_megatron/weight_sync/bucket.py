"""Buckets: what every trainer rank sends, laid into flat byte buffers in one order that all sides compute alike.

A rank's metadata list the tensors it sends, each whole or some rows of it (an expert-parallel rank owns rows of a
fused expert tensor, a pipeline stage its layers). :func:`plan_buckets` cuts the tensors of all ranks into buckets and
puts the buckets into one order. Senders and receivers compute the plan from the same metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError

ALIGNMENT = 16  # bytes: every segment starts where any dtype may be viewed
PAGE = 4096  # bytes: size of a buffer is a multiple, see checksum()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as a rank sends it: HF name, dtype (``"float32"``), shape of the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    """First row and row after the last of dim 0 that the rank sends; None: the whole tensor."""
    position: int = -1
    """Place in the order in which all ranks walk through the model. −1: the place in the rank's own list.

    When ranks gather tensors from one another, the order in which they do so has to agree with this one: a rank waits
    with its bucket until all buckets before it were received, and must not be needed meanwhile.
    """
    turned: str | None = None
    """What the engine's worker makes the tensor on disk with (``weight_sync/turned.py``); None: it is that already."""

    @property
    def adapter(self) -> str:
        """Name of the adapter that it belongs to, in front of its own; of others and those without a name empty."""
        return self.name.rpartition(":")[0]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what the rank sends."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes that the rank sends."""
        return torch.Size(self.shard_shape).numel() * self.torch_dtype.itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def first_byte(self) -> int:
        """Where the rank's rows start in the whole tensor, in bytes."""
        if self.rows is None:
            return 0
        return self.rows[0] * torch.Size(self.shape[1:]).numel() * self.torch_dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, a step along the dimension before the last; of one element for vectors."""
        return torch.Size(self.shape[1:][-1:]).numel() * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one tensor in a bucket."""

    index: int
    """Which of the sender's tensors, by its place in the metadata."""
    start: int
    """First byte within what the sender sends of the tensor."""
    nbytes: int
    offset: int
    """First byte within the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One buffer of one sender. ``nbytes`` includes the padding of its segments."""

    sender: int
    segments: tuple[Segment, ...]
    nbytes: int
    position: tuple[int, int]


def plan_buckets(senders: Sequence[Sequence[TensorMeta]], bucket_bytes: int) -> list[Bucket]:
    """Plan the buckets of all senders, in the order in which they travel.

    A tensor that does not fit into what is left of a bucket starts the next one; one larger than a bucket is cut into
    several. Buckets are ordered by the place of their last tensor in the model, so that every bucket only waits
    for work that lies before it. Raises WeightSyncError for a sender whose tensors are not in the order of the model.
    """
    assert bucket_bytes % PAGE == 0, bucket_bytes
    plan: list[Bucket] = []
    for sender, metadata in enumerate(senders):
        segments: list[Segment] = []
        size, place = 0, -1
        for index, meta in enumerate(metadata):
            if 0 <= meta.position < place:
                raise WeightSyncError(f"sender {sender}: {meta.name} comes after a tensor that the model has later")
            place = meta.position
            for start, nbytes in cuts(meta, bucket_bytes):
                if segments and size + nbytes > bucket_bytes:
                    plan.append(_bucket(sender, metadata, segments, size))
                    segments, size = [], 0
                segments.append(Segment(index, start, nbytes, size))
                size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if segments:
            plan.append(_bucket(sender, metadata, segments, size))
    return sorted(plan, key=lambda bucket: (bucket.position, bucket.sender))


def cuts(meta: TensorMeta, bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut what is sent of a tensor into stretches, (first byte, bytes): whole rows, at most a bucket each.

    They depend on nothing but the tensor, so that ranks that hold shards of it know them too. Raises WeightSyncError
    when a row is larger than a bucket.
    """
    if meta.nbytes <= bucket_bytes:
        return [(0, meta.nbytes)]
    if meta.row_nbytes > bucket_bytes:
        raise WeightSyncError(
            f"bucket_bytes={bucket_bytes} is less than a row of {meta.name} ({meta.row_nbytes} bytes): raise it"
        )
    most = bucket_bytes // meta.row_nbytes * meta.row_nbytes
    return [(start, min(most, meta.nbytes - start)) for start in range(0, meta.nbytes, most)]


def _bucket(sender: int, metadata: Sequence[TensorMeta], segments: list[Segment], size: int) -> Bucket:
    last = segments[-1]
    position = metadata[last.index].position
    place = (position if position >= 0 else last.index, last.start)
    return Bucket(sender, tuple(segments), max(-(-size // PAGE) * PAGE, PAGE), place)


def checksum(buffer: Tensor) -> Tensor:
    """Compute a 64-bit checksum ([] int64) of a buffer ([n · PAGE] uint8), the same on CPU and CUDA.

    The bytes are read as a matrix of int64 words, 512 to the row. Sums over its rows and over its columns, each times
    an odd number that depends on the place, are added modulo 2⁶⁴: a flipped bit, a lost or stale stretch and any two
    exchanged words change it, at two passes over the memory and nothing else.
    """
    words = buffer.view(torch.int64).view(-1, PAGE // 8)
    by_row, by_column = words.sum(1), words.sum(0)
    return (by_row * _odd(by_row, 0x5851F42D4C957F2D)).sum() + (by_column * _odd(by_column, 0x2545F4914F6CDD1D)).sum()


def _odd(like: Tensor, multiplier: int) -> Tensor:
    places = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    return places * multiplier | 1
