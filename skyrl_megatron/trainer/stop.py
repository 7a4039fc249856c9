"""Ctrl-C and SIGTERM: the first one ends the run at the next point where nothing is lost, the second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.trainer.loop_thread import LoopThread


class StopRequested(KeyboardInterrupt):
    """Somebody asked the run to end; its state is that of the last complete step."""


class StopSignal:
    """Handlers for the time of ``with``; outside a main thread it does nothing."""

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
        self.requested = True
        if self._work is not None:
            loop, task = self._work
            loop.call_soon_threadsafe(task.cancel)

    def run[T](self, loop: LoopThread, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which changes no state: a signal cancels it and raises StopRequested."""

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._work = asyncio.get_running_loop(), task
            try:
                return await work
            finally:
                self._work = None

        try:
            return loop.run(cancellable())
        except CancelledError:
            self.check()
            raise

    def check(self) -> None:
        """Raise StopRequested when a signal came before."""
        if self.requested:
            raise StopRequested
