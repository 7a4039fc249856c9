"""What this process is busy with, said whenever nothing was said for a while: no wait looks like a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 10.0
"""Longest silence of a command."""

_under_way: list[tuple[str, float]] = []
"""Tasks and when they began, the innermost last; those of the command's main thread."""
_listeners: list[Callable[[str], None]] = []
"""Where lines go: to that of the innermost :func:`heartbeat`."""
_spoken = time.monotonic()


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
def heartbeat(say: Callable[[str], None], quiet_s: float | None = None) -> Iterator[None]:
    """Let a thread say what is under way whenever nothing was said for ``quiet_s`` seconds (:data:`QUIET_S`).

    A block inside another one of this process has no thread of its own: while it lasts, the outer one's thread uses
    its ``say``.
    """
    _listeners.append(say)
    outermost = len(_listeners) == 1
    beat = _Beat(QUIET_S if quiet_s is None else quiet_s) if outermost else None
    try:
        yield
    finally:
        _listeners.remove(say)
        if beat is not None:
            beat.end()


class _Beat:
    """The thread."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._ended, self._entered = quiet_s, threading.Event(), time.monotonic()
        spoke()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(_spoken + self._quiet_s - time.monotonic(), 0.05)):
            if time.monotonic() - _spoken >= self._quiet_s and _listeners:
                task, began = _under_way[-1] if _under_way else ("start", self._entered)
                spoke()
                _listeners[-1](f"… {task}: {time.monotonic() - began:.0f} s so far")
