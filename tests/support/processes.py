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


def shared_memory() -> set[str]:
    """Names of the files of shared memory of this machine."""
    return set(os.listdir("/dev/shm"))


def abandoned_memory(before: Set[str], within_s: float = 10.0) -> set[str]:
    """Files of shared memory that appeared after ``before`` and that no process uses, once none is left or after
    ``within_s``. Tests of another pytest worker have files of their own, which their processes map or hold open.
    """
    deadline = time.monotonic() + within_s
    while (found := shared_memory() - before - _used_memory()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found & shared_memory()


def _used_memory() -> set[str]:
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            used |= {line.rpartition("/dev/shm/")[2] for line in (process / "maps").read_text().splitlines()}
        with contextlib.suppress(OSError):
            used |= {os.readlink(each).removeprefix("/dev/shm/") for each in (process / "fd").iterdir()}
    return used
