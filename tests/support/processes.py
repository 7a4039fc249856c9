"""Processes that tests started, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Set
from pathlib import Path

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. One that ended and that its parent has not asked about (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_behind(processes: Iterable[psutil.Process], within_s: float = 300.0) -> list[psutil.Process]:
    """Those that still run, once all are gone or after ``within_s``."""
    deadline = time.monotonic() + within_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def given_the_folder(folder: Path) -> list[psutil.Process]:
    """Processes that have ``TMPDIR=folder`` among their variables, which children inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


def shared_memory() -> set[str]:
    """Names of the files of shared memory of this machine."""
    return set(os.listdir("/dev/shm"))


def abandoned_memory(before: Set[str], within_s: float = 10.0) -> set[str]:
    """Files of shared memory that appeared after ``before`` and that no process uses, once none is left or after
    ``within_s``. Tests of another pytest worker have files of their own, which their processes map or hold open.
    """
    deadline = time.monotonic() + within_s
    while (found := _unused_memory(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _unused_memory(before: Set[str]) -> set[str]:
    # Listed first: what appears in between is used by the process that makes it.
    inodes = {}
    for name in shared_memory() - before:
        with contextlib.suppress(FileNotFoundError):
            inodes[name] = os.stat(f"/dev/shm/{name}").st_ino
    used = _used_inodes()
    return {name for name, inode in inodes.items() if inode not in used and os.path.exists(f"/dev/shm/{name}")}


def _used_inodes() -> set[int]:
    """Compared by inode: the process that makes a semaphore maps it under a name of before its link to its own."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            lines = (process / "maps").read_text().splitlines()
            used |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        with contextlib.suppress(OSError):
            for each in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed
                    if os.readlink(each).startswith("/dev/shm/"):
                        used.add(each.stat().st_ino)
    return used
