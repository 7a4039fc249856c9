"""A file that only grows, and is flushed to the disk when asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PARTS = os.sysconf("SC_IOV_MAX")


class AppendedFile:
    """A file open for appending. ``new``: it must not be there yet. Every method raises OSError."""

    def __init__(self, path: Path, *, new: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        self.path = path
        self._descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Append all parts."""
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        while views:
            written = os.writev(self._descriptor, views[:_PARTS])
            self.size += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def cut(self, size: int) -> None:
        """Leave the first ``size`` bytes, durably."""
        os.ftruncate(self._descriptor, size)
        self.size = size
        self.flush()

    def flush(self) -> None:
        """Return once everything is on the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file without flushing it."""
        os.close(self._descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
