"""Bytes of a checkpoint file that were compared with the manifest before anybody sees them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import IO

from skyrl_megatron.runtime.checkpoint.host_memory import HostBuffer
from skyrl_megatron.runtime.checkpoint.manifest import BLOCK_BYTES, FileEntry, check_block, read_into
from skyrl_megatron.runtime.checkpoint.storage import Storage

WINDOW_BLOCKS = 12
AHEAD_BLOCKS = 4
"""Read while the blocks before them are hashed and used: the storage always has a request."""


class VerifiedFile:
    """The ``ranges`` (first byte, end) of one file, to be read in ascending order; every block that they touch is read
    and hashed once.

    What is used is exactly what was hashed: a file that changes on disk between check and use cannot slip through.
    Memory: a window of :data:`WINDOW_BLOCKS` blocks, or the longest range, and what is read ahead: two requests of the
    storage, or :data:`AHEAD_BLOCKS`.
    """

    def __init__(
        self, storage: Storage, path: str, entry: FileEntry, buffer: HostBuffer, ranges: Iterable[tuple[int, int]]
    ) -> None:
        self._path, self._entry = path, entry
        spans = [(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in ranges]
        self._needed = {block for first, end in spans for block in range(first, end)}
        longest = max((end - first for first, end in spans), default=0)
        self._capacity = max(longest + 1, WINDOW_BLOCKS)
        request = max(storage.request_bytes // BLOCK_BYTES, 1)
        requests = [
            (first * BLOCK_BYTES, min(end * BLOCK_BYTES, entry.bytes))
            for first, end in _runs(sorted(self._needed), request)
        ]
        window = self._capacity * BLOCK_BYTES
        ahead = max(2, AHEAD_BLOCKS // request) * request * BLOCK_BYTES
        memory = memoryview(buffer.reserve(window + ahead).numpy())
        self._memory = memory[:window]
        self._begin = self._end = 0  # bytes of the file that the window holds, verified
        self._ahead = _ReadAhead(storage.open(path), path, requests, memory[window:], request * BLOCK_BYTES)
        self._blocks = self._verified()

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``, valid until the next. Raises CheckpointError on damage or a short file."""
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
        while self._end < end_byte:
            start, block = next(self._blocks)
            assert start == self._end, "ranges are read in ascending order"
            self._memory[start - begin : start - begin + len(block)] = block
            self._end += len(block)

    def _verified(self) -> Iterator[tuple[int, memoryview]]:
        """(first byte, bytes) of the needed blocks, in order; valid until the next one."""
        for start, data in self._ahead.requests():
            for place in range(0, len(data), BLOCK_BYTES):
                block, index = data[place : place + BLOCK_BYTES], (start + place) // BLOCK_BYTES
                check_block(self._path, index, block, self._entry.blake3[index])
                yield start + place, block

    def close(self) -> None:
        """Close the file."""
        self._ahead.close()


class _ReadAhead:
    """Reads ``requests`` (first byte, end) of a file in a thread, into slots of ``memory`` that take turns."""

    def __init__(
        self, file: IO[bytes], path: str, requests: list[tuple[int, int]], memory: memoryview, slot_bytes: int
    ) -> None:
        self._file, self._path, self._requests = file, path, requests
        self._stopped = False
        self._free: queue.Queue[memoryview | None] = queue.Queue()
        for start in range(0, len(memory), slot_bytes):
            self._free.put(memory[start : start + slot_bytes])
        self._read: queue.Queue[tuple[int, memoryview, memoryview] | BaseException] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=f"read {path}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for start, stop in self._requests:
                slot = self._free.get()
                if slot is None or self._stopped:
                    return
                self._file.seek(start)
                read_into(self._file, slot[: stop - start], self._path)
                self._read.put((start, slot[: stop - start], slot))
        except BaseException as error:
            self._read.put(error)

    def requests(self) -> Iterator[tuple[int, memoryview]]:
        """(first byte, bytes) of each request, in order; valid until the next one. Raises CheckpointError."""
        for _ in self._requests:
            item = self._read.get()
            if isinstance(item, BaseException):
                raise item
            start, data, slot = item
            yield start, data
            self._free.put(slot)

    def close(self) -> None:
        """Stop reading and close the file."""
        self._stopped = True
        self._free.put(None)
        self._thread.join()
        self._file.close()


def _runs(blocks: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """(first, end) of consecutive numbers, at most ``longest`` each."""
    first = None
    for number, block in enumerate(blocks):
        first = block if first is None else first
        if number + 1 == len(blocks) or blocks[number + 1] != block + 1 or block + 1 - first == longest:
            yield first, block + 1
            first = None
