"""Memory that buckets are received into, used again once nothing reads it any more. Knows no bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_megatron import device

KEPT = 3
"""Buffers that stay between two updates: one that is loaded from, one that is received into, and the one before them,
whose last tensor a loader's loop still holds."""


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    idle: int
    """References to its memory when nobody uses it."""
    content: tuple[int, int] | None = None
    """Number of what is in it, and its bytes; None: nothing that is still to be checked."""
    read: Callable[[], None] | None = None
    """Waits until the device has read it; None: it is in use."""


class BufferPool:
    """Buffers of one receiver. One thread fills them, another, the consumer, loads from them.

    A tensor that is gone says nothing about the device: the consumer's copies out of it are queued on the consumer's
    stream, which may be far behind, and the thread that fills buffers has a stream of its own. So a buffer is free
    once nothing refers to it *and* the consumer has then marked its stream (:meth:`retire`), and it is filled again
    when that mark has been reached.

    ``leaving(number, buffer)`` gets the content of a buffer after the last copy out of it and before it is overwritten
    or freed.
    """

    def __init__(self, on: torch.device, leaving: Callable[[int, Tensor], None]) -> None:
        self.device, self._leaving = on, leaving
        self._buffers: list[_Buffer] = []
        self._changing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that the pool holds."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def take(self, number: int, nbytes: int) -> Tensor:
        """Return a buffer, [nbytes] uint8, for content ``number``: a free one that was read, else a new one."""
        with self._changing:  # once there is a view of it, retire() sees that it is in use
            free = next((b for b in self._buffers if b.read is not None and b.memory.numel() >= nbytes), None)
            if free is None:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                free = _Buffer(memory, _references(memory))
                self._buffers.append(free)
            read, free.read = free.read, None
            view = free.memory[:nbytes]
        self._leave(free, read)
        free.content = number, nbytes
        return view

    def retire(self) -> None:
        """Mark what nothing refers to any more as read, as soon as the work queued so far is done. Consumer's thread.

        The mark comes after the look at the references, and what dropped them had queued its copies before.
        """
        with self._changing:
            idle = [b for b in self._buffers if b.read is None and _references(b.memory) == b.idle]
            if idle:
                reached = device.mark()
                for buffer in idle:
                    buffer.read = reached

    def trim(self) -> None:
        """End an update: wait for the device, and give back all but :data:`KEPT` buffers. Consumer's thread."""
        reached = device.mark()
        for buffer in self._buffers:
            self._leave(buffer, reached)
            buffer.read = reached
        free = [buffer for buffer in self._buffers if _references(buffer.memory) == buffer.idle]
        self._buffers = free[:KEPT]

    def _leave(self, buffer: _Buffer, read: Callable[[], None] | None) -> None:
        """Wait until the device has read a buffer, and hand its content out for the last time."""
        if buffer.content is not None and read is not None:
            read()
            number, nbytes = buffer.content
            self._leaving(number, buffer.memory[:nbytes])
            buffer.content = None


def _references(memory: Tensor) -> int:
    """Count the tensors that live in the memory, as torch does: views that loaders keep count too."""
    storage = memory.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
