"""Host memory for a copy of a rank's state, kept from one save to the next."""

from __future__ import annotations

import mmap

import torch

from skyrl_megatron import device


class HostBuffer:
    """A buffer that grows to the largest copy asked for. Pinned on a GPU machine, so that copies run at link speed;
    else in large pages, which a first touch fills fast."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes, uint8; what they held before is lost."""
        if self._bytes.numel() < count:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old one before taking the new one
            self._bytes = _pinned(count) if device.has_cuda() else _large_pages(count)
        return self._bytes[:count]

    def release(self) -> None:
        """Give the memory back."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


def _large_pages(count: int) -> torch.Tensor:
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; a copy of it (at most a bucket) when it is on a GPU."""
    return memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
