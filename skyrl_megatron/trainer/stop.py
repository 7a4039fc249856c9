"""Ctrl-C and SIGTERM: the first one ends the run at the next point where nothing is lost, the second one at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(KeyboardInterrupt):
    """Somebody asked the run to end; its state is that of the last complete step."""


class StopSignal:
    """Handlers for the time of ``with``; outside a main thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: whoever owns it decides
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._interruptible:
            raise StopRequested

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A phase that changes no state: it may be broken off. Raises StopRequested when a signal came."""
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def check(self) -> None:
        """Raise StopRequested when a signal came before."""
        if self.requested:
            raise StopRequested
