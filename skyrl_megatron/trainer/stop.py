"""Ctrl-C and SIGTERM: the first one ends the run at the next point where nothing is lost, the second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(KeyboardInterrupt):
    """The run was asked to end, and did after its last complete step."""


class StopSignal:
    """Handlers of SIGINT and SIGTERM for the time of ``with``; outside the main thread, :meth:`request` alone."""

    def __init__(self) -> None:
        self.requested = False
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
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
        self.request()

    def request(self) -> None:
        """Ask the run to end, from any thread."""
        self.requested = True
        if self._work is not None:
            loop, task = self._work
            loop.call_soon_threadsafe(task.cancel)

    @contextmanager
    def cancelling(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Iterator[None]:
        """Let a request cancel ``task`` of ``loop`` while the block runs."""
        self._work = loop, task
        try:
            yield
        finally:
            self._work = None

    def check(self) -> None:
        """Raise StopRequested when a stop was requested before."""
        if self.requested:
            raise StopRequested
