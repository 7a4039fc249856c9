"""Buckets: tensors laid into flat byte buffers, the same way on the sending and on the receiving side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: every tensor starts where any dtype may be viewed
DEFAULT_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as it travels: HF name, dtype (``"float32"``), whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a list and where each starts; ``nbytes`` is the size of the buffer."""

    first: int
    offsets: tuple[int, ...]
    nbytes: int

    @property
    def last(self) -> int:
        """Index after the last tensor."""
        return self.first + len(self.offsets)


def plan_buckets(tensors: Sequence[TensorMeta], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[Bucket]:
    """Cut a list of tensors into buckets of at most ``bucket_bytes``; a larger tensor gets a bucket of its own."""
    buckets, first, offsets, size = [], 0, [], 0
    for index, tensor in enumerate(tensors):
        space = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if offsets and size + space > bucket_bytes:
            buckets.append(Bucket(first, tuple(offsets), size))
            first, offsets, size = index, [], 0
        offsets.append(size)
        size += space
    if offsets:
        buckets.append(Bucket(first, tuple(offsets), size))
    return buckets


def write_tensor(buffer: Tensor, offset: int, tensor: Tensor) -> None:
    """Copy a tensor's bytes into the buffer ([nbytes] uint8)."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    buffer[offset : offset + data.numel()].copy_(data)


def read_tensor(buffer: Tensor, offset: int, meta: TensorMeta) -> Tensor:
    """A view of the buffer as the tensor."""
    return buffer[offset : offset + meta.nbytes].view(meta.torch_dtype).view(meta.shape)


def checksum(buffer: Tensor) -> int:
    """64-bit checksum of a buffer: every byte and its place count, on CPU and CUDA alike.

    The bytes are read as int64 words; the sum of words times odd numbers that depend on their place wraps modulo 2⁶⁴,
    so a flipped bit, a lost tail and two exchanged pieces all change it.
    """
    words = buffer.view(torch.int64)
    places = torch.arange(words.numel(), dtype=torch.int64, device=buffer.device)
    return int((words * (places * 0x5851F42D4C957F2D + 0x14057B7EF767814F | 1)).sum())
