"""Host memory that a rank keeps from one use to the next: pinned on a GPU machine, so that copies run at link speed.

It is taken in blocks of a fixed power of two: torch's allocator of pinned memory rounds every request up to one, and a
request for 40 GB would hold 64.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from skyrl_megatron import device

BLOCK_BYTES = 1 << 28


class HostMemory:
    """Pieces of blocks, handed out in order. :meth:`rewind` hands the same memory out again: what is asked for in the
    same order lies in the same place, and nothing is allocated twice."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._block = self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return len(self._blocks) * self._block_bytes

    def take(self, count: int) -> Tensor:
        """Return ``count`` bytes in one piece, uint8, at most a block; what they hold is undefined."""
        assert count <= self._block_bytes, (count, self._block_bytes)
        if self._used + count > self._block_bytes:
            self._block, self._used = self._block + 1, 0
        return self._next(count)

    def pieces(self, count: int) -> list[Tensor]:
        """Return ``count`` bytes in as few pieces as fill the blocks without a gap."""
        found: list[Tensor] = []
        while count:
            if self._used == self._block_bytes:
                self._block, self._used = self._block + 1, 0
            size = min(count, self._block_bytes - self._used)
            found.append(self._next(size))
            count -= size
        return found

    def rewind(self) -> None:
        """Hand everything out again, from the beginning."""
        self._block = self._used = 0

    def _next(self, count: int) -> Tensor:
        if self._block == len(self._blocks):
            self._blocks.append(host_bytes(self._block_bytes))
        start, self._used = self._used, self._used + count
        return self._blocks[self._block][start : self._used]


def host_bytes(count: int) -> Tensor:
    """Take ``count`` bytes of host memory, uint8: pinned on a GPU machine, else in large pages, which a first touch
    fills fast."""
    if device.has_cuda():
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
