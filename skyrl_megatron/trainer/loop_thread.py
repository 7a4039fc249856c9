"""The event loop of a run, in a thread of its own: engines are watched and their endpoint answers while the trainer
computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """Runs for the time of ``with``; what is still under way at its end is cancelled."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(_cancel_the_others())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self.loop.close()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, run on the loop; for any thread but the loop's own.

        Raises what ``work`` raises; ``concurrent.futures.CancelledError`` when it was cancelled. A signal handler that
        raises ends the wait, and with it ``work``.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _cancel_the_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S)
