"""Ctrl-C, SIGTERM and SIGHUP while steps are taken: the first one ends the run at the next point where nothing is
lost, the second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from skyrl_megatron.interrupts import Interrupted, replace_handlers, restore_handlers


class StopRequested(Interrupted):
    """The run was asked to end, and did after its last complete step, which it prints."""

    said = True


class StopSignal:
    """Handlers of the three signals for the time of ``with``; outside the main thread, :meth:`request` alone.

    ``waits``: whether there is something to lose, so that the first signal only asks; else it ends the run at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.waits = True
        self._number: int = signal.SIGINT
        self._work: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = replace_handlers(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self.waits:
            before = self._before.get(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)  # the command's, which then has a deadline
                return
            raise Interrupted(number)
        self._number = number
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
            raise self.stopped()

    def stopped(self) -> StopRequested:
        """Return what to raise once the run has stopped, for the signal that asked."""
        return StopRequested(self._number)
