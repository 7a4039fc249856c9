"""What this process is busy with, said whenever nothing was said for a while: no wait looks like a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 20.0
"""Longest silence of a run."""

_under_way: list[tuple[str, float]] = []
"""Tasks and when they began, the innermost last; those of the run's main thread."""
_spoken = time.monotonic()
_beating = threading.Lock()


def spoke() -> None:
    """Note that a line was written."""
    global _spoken
    _spoken = time.monotonic()


@contextmanager
def under_way(task: str) -> Iterator[None]:
    """Name what is done inside the block, for as long as it takes."""
    entry = (task, time.monotonic())
    _under_way.append(entry)
    try:
        yield
    finally:
        _under_way.remove(entry)


@contextmanager
def heartbeat(say: Callable[[str], None], quiet_s: float = QUIET_S) -> Iterator[None]:
    """Let a thread say what is under way whenever nothing was said for ``quiet_s`` seconds. Inside another block of
    this process it does nothing."""
    if not _beating.acquire(blocking=False):
        yield
        return
    ended, entered = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(max(_spoken + quiet_s - time.monotonic(), 0.05)):
            if time.monotonic() - _spoken >= quiet_s:
                task, began = _under_way[-1] if _under_way else ("start", entered)
                spoke()
                say(f"… {task}: {time.monotonic() - began:.0f} s so far")

    spoke()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _beating.release()
