"""The event loop of a run. It has its own thread, so that engines are monitored and requests are served while the
trainer works.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import nullcontext
from typing import Any

from skyrl_megatron.errors import DistributedError
from skyrl_megatron.trainer.stopping import StopSignal

CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """An event loop in a thread, within ``with``. Tasks that are unfinished at the end are cancelled."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(_cancel_others())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self.loop.close()

    def run[T](
        self,
        work: Coroutine[Any, Any, T],
        phase: str = "",
        *,
        timeout_s: float | None = None,
        stop: StopSignal | None = None,
    ) -> T:
        """Run ``work`` on the loop and return its result. Call it from any thread except the thread of the loop.

        With ``stop``, a signal cancels ``work`` and StopRequested is raised; use it only for work that changes no
        state. Raises what ``work`` raises, DistributedError after ``timeout_s``, and CancelledError of
        ``concurrent.futures`` if ``work`` was cancelled. If a signal handler raises, ``work`` is cancelled as well.
        """

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            with stop.cancelling(self.loop, task) if stop is not None else nullcontext():
                return await (work if timeout_s is None else with_timeout(work, timeout_s, phase))

        future = asyncio.run_coroutine_threadsafe(cancellable(), self.loop)
        try:
            return future.result()
        except CancelledError:
            if stop is not None:
                stop.check()
            raise
        except BaseException:
            future.cancel()
            raise

    def call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the loop, and return its result."""

        async def call() -> T:
            return function(*arguments)

        return self.run(call())


async def with_timeout[T](work: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
    """Return the result of ``work``. Raises DistributedError after ``timeout_s``."""
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError as error:
        raise DistributedError(
            f"phase {phase}: not done within {timeout_s:g} s (trainer.phase_timeout_s). Raise it, or look for "
            "engines or environments that hang"
        ) from error


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S)
