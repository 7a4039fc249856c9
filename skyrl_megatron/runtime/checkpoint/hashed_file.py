"""A file that is hashed while it is written."""

from __future__ import annotations

from bridges.staging import FileWriter
from skyrl_megatron.runtime.checkpoint.manifest import BlockHasher, FileEntry


class HashedFile:
    """A file being written from front to back (a :class:`FileWriter`), whose entry of the manifest grows with it."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._hasher = BlockHasher()

    def write(self, *parts: memoryview | bytes) -> None:
        self._file.write(*parts)
        for part in parts:
            self._hasher.update(part)

    def finish(self) -> None:
        self._file.finish()

    def abandon(self) -> None:
        self._file.abandon()

    def entry(self) -> FileEntry:
        """Return size and hashes of all bytes so far."""
        return self._hasher.entry()
