"""Processes that tests started, and whether they are gone."""

from __future__ import annotations

import time
from collections.abc import Iterable

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
