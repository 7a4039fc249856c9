"""Bytes of a checkpoint file that were compared with the manifest before anybody sees them."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_megatron.runtime.checkpoint.host_memory import HostBuffer
from skyrl_megatron.runtime.checkpoint.manifest import BLOCK_BYTES, FileEntry, check_block, read_into
from skyrl_megatron.runtime.checkpoint.storage import Storage

WINDOW_BLOCKS = 16


class VerifiedFile:
    """The ``ranges`` (first byte, end) of one file, to be read in ascending order; every block that they touch is read
    and hashed once.

    What is used is exactly what was hashed: a file that changes on disk between check and use cannot slip through.
    Memory: a window of :data:`WINDOW_BLOCKS` blocks, or the longest range.
    """

    def __init__(
        self, storage: Storage, path: str, entry: FileEntry, buffer: HostBuffer, ranges: Iterable[tuple[int, int]]
    ) -> None:
        self._storage, self._path, self._entry = storage, path, entry
        spans = [(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in ranges]
        self._needed = {block for first, end in spans for block in range(first, end)}
        longest = max((end - first for first, end in spans), default=0)
        self._capacity = max(longest + 1, WINDOW_BLOCKS)
        self._memory = memoryview(buffer.reserve(self._capacity * BLOCK_BYTES).numpy())
        self._begin = self._end = 0  # bytes of the file that the memory holds, verified
        self._file = storage.open(path)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)``, valid until the next call. Raises CheckpointError on damage or a short file."""
        if not (self._begin <= start and stop <= self._end):
            self._fill(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return self._memory[start - self._begin : stop - self._begin]

    def _fill(self, first: int, end: int) -> None:
        """Hold blocks ``[first, end)`` and those needed right after them, as far as there is room."""
        while end in self._needed and end - first < self._capacity:
            end += 1
        begin, end_byte = first * BLOCK_BYTES, min(end * BLOCK_BYTES, self._entry.bytes)
        kept = max(0, self._end - begin) if self._begin <= begin else 0
        if kept:
            self._memory[:kept] = self._memory[begin - self._begin : begin - self._begin + kept]
        self._begin = self._end = begin  # until the rest is verified, only what is kept counts
        self._end += kept
        self._file.seek(self._end)
        while self._end < end_byte:
            count = min(end_byte - self._end, self._storage.request_bytes)
            request = self._memory[self._end - begin : self._end - begin + count]
            read_into(self._file, request, self._path)
            if end in self._needed:
                self._storage.expect(self._file, end_byte, self._capacity * BLOCK_BYTES)
            for place in range(0, count, BLOCK_BYTES):
                index = (self._end + place) // BLOCK_BYTES
                check_block(self._path, index, request[place : place + BLOCK_BYTES], self._entry.blake3[index])
            self._end += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
