"""Host memory for reading a checkpoint, kept from one chunk to the next, and the bytes of tensors that are written."""

from __future__ import annotations

import torch

from skyrl_megatron.runtime.host_memory import host_bytes


class HostBuffer:
    """A buffer that grows to the largest piece asked for."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes, uint8; what they held before is lost."""
        if self._bytes.numel() < count:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old one before taking the new one
            self._bytes = host_bytes(count)
        return self._bytes[:count]

    def release(self) -> None:
        """Give the memory back."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; a copy of it (at most a bucket) when it is on a GPU."""
    return memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
