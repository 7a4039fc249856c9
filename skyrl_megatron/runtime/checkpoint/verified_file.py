"""Bytes of a checkpoint file that were compared with the manifest before anybody sees them."""

from __future__ import annotations

from skyrl_megatron.runtime.checkpoint.host_memory import HostBuffer
from skyrl_megatron.runtime.checkpoint.manifest import (
    BLOCK_BYTES,
    FileEntry,
    check_block,
    read_into,
)
from skyrl_megatron.runtime.checkpoint.storage import Storage


class VerifiedFile:
    """Ranges of one file. Read in ascending order, every block is read and hashed once.

    Holds the blocks of the last range only. What is used is exactly what was hashed: a file that changes on disk
    between check and use cannot slip through.
    """

    def __init__(self, storage: Storage, path: str, entry: FileEntry, buffer: HostBuffer) -> None:
        self._path, self._entry = path, entry
        self._file = storage.open(path)
        self._request_bytes = storage.request_bytes  # a multiple of BLOCK_BYTES
        self._buffer = buffer
        self._window = memoryview(b"")
        self._begin = self._end = 0  # bytes of the file that the window holds

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)``, valid until the next call. Raises CheckpointError on damage or a short file."""
        if not 0 <= start <= stop <= self._entry.bytes:
            raise ValueError(f"{self._path}: bytes {start} to {stop} of {self._entry.bytes}")
        if not (self._begin <= start and stop <= self._end):
            self._fill(start, stop)
        return self._window[start - self._begin : stop - self._begin]

    def _fill(self, start: int, stop: int) -> None:
        begin = start - start % BLOCK_BYTES
        end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._entry.bytes)
        kept = bytes(self._window[begin - self._begin :]) if self._begin <= begin < self._end else b""
        room = max(end - begin, 16 * BLOCK_BYTES + BLOCK_BYTES)
        self._window = memoryview(self._buffer.reserve(room).numpy())[: end - begin]
        self._window[: len(kept)] = kept
        self._begin, self._end = begin, end
        done = len(kept)
        self._file.seek(begin + done)
        try:
            while done < len(self._window):
                request = self._window[done : done + self._request_bytes]
                read_into(self._file, request, self._path)
                for place in range(0, len(request), BLOCK_BYTES):
                    index = (begin + done + place) // BLOCK_BYTES
                    check_block(self._path, index, request[place : place + BLOCK_BYTES], self._entry.blake3[index])
                done += len(request)
        except BaseException:
            self._begin = self._end = 0
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()
