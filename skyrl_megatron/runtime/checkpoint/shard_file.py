"""The file a rank writes: ``__<rank>_0.distcp``, blocks end to end, each a ``torch.save`` archive.

The bytes around the data depend on shape and dtype only (:func:`bridges.archive.frame`), so data goes from where it
lies straight into the file and into the hash.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from bridges.archive import frame
from skyrl_megatron.runtime.checkpoint import fault_points
from skyrl_megatron.runtime.checkpoint.host_memory import as_bytes
from skyrl_megatron.runtime.checkpoint.local_state import Block
from skyrl_megatron.runtime.checkpoint.manifest import BlockHasher, FileEntry
from skyrl_megatron.runtime.checkpoint.storage import Storage

ALIGNMENT = 64  # archives start at multiples, so that data can be used where it lies in a mapped file


class ShardFile:
    """One ``.distcp`` file, written from front to back."""

    def __init__(self, storage: Storage, folder: str, name: str) -> None:
        self.name = name
        self.chunks: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int]] = []
        """(key, offsets, sizes, first byte, bytes) of everything written; objects have offsets ()."""
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Key → (dtype's name, global shape)."""
        self._end = 0
        self._hasher = BlockHasher()
        self._sink = storage.create(f"{folder}/{name}")

    def append(self, block: Block) -> None:
        """Write a block."""
        tensor = block.data
        before, after = frame(block.sizes, tensor.dtype)
        self._record(block.key, block.offsets, block.sizes, before, as_bytes(tensor), after)
        self.tensors[block.key] = (str(tensor.dtype).removeprefix("torch."), block.global_shape)
        fault_points.reached("between shards")

    def append_object(self, key: str, value: Any) -> None:
        """Write what is not a tensor, as Megatron does: ``torch.save([value])``."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        self._record(key, (), (), buffer.getbuffer())

    def _record(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], *parts: memoryview | bytes) -> None:
        padding = bytes(-self._end % ALIGNMENT)
        start = self._end + len(padding)
        self._sink.write(padding, *parts)
        for part in (padding, *parts):
            self._hasher.update(part)
        self._end = start + sum(len(part) for part in parts)
        self.chunks.append((key, offsets, sizes, start, self._end - start))

    def finish(self) -> FileEntry:
        """Make the file durable and return its hashes."""
        self._sink.finish()
        return self._hasher.entry()

    def abandon(self) -> None:
        """Close the file as it is; safe after :meth:`finish`."""
        self._sink.abandon()
