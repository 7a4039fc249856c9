"""A disk of a run's own that is slow, or fails, once its state says so: a folder that is reached through FUSE.

    python -m tests.faults.failing_disk FOLDER MOUNTED STATE

STATE is a file that says how it is: ``well``, ``EIO`` or ``slow ×10``. The files are in FOLDER, and are whole there.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

WELL, SLOWER = "well", 10
STAT = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
TIMES = ("st_atime", "st_mtime", "st_ctime")
STATFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class FailingDisk(Operations):  # type: ignore[misc]
    """What is done to the files in ``folder``. The kernel remembers what was read, as it does of any disk."""

    use_ns = True

    def __init__(self, folder: str, state: Path) -> None:
        self.folder, self.state = folder, state

    def _reach[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what ``work`` returns, as far as the disk is well."""
        state = self.state.read_text()
        if state == "EIO":
            raise FuseOSError(errno.EIO)
        began = time.monotonic()
        result = work(*arguments)
        if state != WELL:
            time.sleep((SLOWER - 1) * (time.monotonic() - began))
        return result

    def _at(self, path: str) -> str:
        return self.folder + path

    # ------------------------------------------------------------------ names
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        return {name: getattr(found, name) for name in STAT} | {name: getattr(found, f"{name}_ns") for name in TIMES}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in STATFS}

    def mkdir(self, path: str, mode: int) -> int:
        return self._reach(os.mkdir, self._at(path), mode) or 0

    def rmdir(self, path: str) -> int:
        return self._reach(os.rmdir, self._at(path)) or 0

    def unlink(self, path: str) -> int:
        return self._reach(os.unlink, self._at(path)) or 0

    def rename(self, old: str, new: str) -> int:
        return self._reach(os.rename, self._at(old), self._at(new)) or 0

    def symlink(self, target: str, source: str) -> int:
        return self._reach(os.symlink, source, self._at(target)) or 0

    def link(self, target: str, source: str) -> int:
        return self._reach(os.link, self._at(source), self._at(target)) or 0

    def chmod(self, path: str, mode: int) -> int:
        return self._reach(os.chmod, self._at(path), mode) or 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return self._reach(lambda: os.utime(self._at(path), ns=times)) or 0

    # ------------------------------------------------------------------ what is in them
    def open(self, path: str, flags: int) -> int:
        return self._reach(os.open, self._at(path), flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return self._reach(os.open, self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._reach(os.pread, fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._reach(os.pwrite, fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return self._reach(os.truncate, self._at(path) if fh is None else fh, length) or 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return self._reach(os.fsync, fh) or 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return self._reach(lambda: None) or 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    folder, mounted, state = sys.argv[1:]
    FUSE(FailingDisk(folder, Path(state)), mounted)  # in a process of its own, until the folder is given back
