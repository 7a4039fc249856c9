"""A thread pool for environments, with limits on threads and on time per call, so that no environment blocks the run.

Python cannot end a thread. A call that exceeds the time limit is abandoned: its caller gets EnvTimeout, and another
thread replaces its thread, which ends when the call returns. Threads are daemons, so they do not keep the process
alive. The pool does not use anyio's ``to_thread``, which wakes the event loop for each result and takes about ten
times the CPU time per call.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class _Expired(BaseException):
    """Ends a function that exceeded its time limit. ``except Exception`` inside the function does not catch it."""


def within[**P, T](seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``. Raises what it raises, and TimeoutError after ``seconds``.

    Thread-safe. The function runs in a separate thread, and its Python code ends soon after the limit. A call into C
    that does not return (a regular expression, a solver) cannot be ended: its thread stays until the call returns, and
    blocks all other threads if it holds the GIL. Run such code in a process: ``subprocess.run(…, timeout=seconds)``.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function(*args, **kwargs)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Expired))
        raise TimeoutError(f"{getattr(function, '__name__', function)} took longer than {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    result: T = outcome["result"]
    return result


class EnvTimeout(Exception):
    """A call of an environment exceeded the time limit."""


class _Call:
    """One function call in the pool."""

    __slots__ = ("arguments", "function", "future", "started", "worker")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self.function, self.arguments, self.future = function, arguments, future
        self.started: float | None = None
        self.worker: _Worker | None = None


class _Worker(threading.Thread):
    """Runs calls until it gets None or is abandoned."""

    def __init__(self, calls: SimpleQueue[_Call | None], answers: _Results) -> None:
        super().__init__(name="environment", daemon=True)
        self.calls, self.answers, self.abandoned = calls, answers, False

    def run(self) -> None:
        while not self.abandoned and (call := self.calls.get()) is not None:
            call.worker, call.started = self, time.monotonic()
            try:
                result, error = call.function(*call.arguments), None
            except BaseException as raised:
                result, error = None, raised
            call.started = None
            if not self.abandoned:
                self.answers.put(call.future, result, error)


class _Results:
    """Delivers results to the event loop that waits for them.

    Waking the loop costs a system call and a thread switch, so one wake-up serves all results that arrive before the
    loop runs.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Add a result. Thread-safe."""
        self._waiting.append((future, result, error))
        loop = future.get_loop()
        if self._woken is loop:
            return
        self._woken = loop
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            pass  # the loop is closed: nothing waits for it

    def _deliver(self) -> None:
        self._woken = None  # the next result wakes the loop again
        while self._waiting:
            future, result, error = self._waiting.popleft()
            if (
                future.done() or future.get_loop().is_closed()
            ):  # the caller was cancelled or timed out, or its loop is gone
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, Exception) and not isinstance(error, StopIteration):
                future.set_exception(error)
            else:  # SystemExit of an environment must not end this process; a future cannot carry StopIteration
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


class EnvBusy(Exception):
    """An environment cannot begin yet, as its server has no place: the same call is to be made again later."""


class EnvPool:
    """A thread pool that runs at most ``workers`` calls at a time, each for at most ``timeout_s`` seconds.

    Only one event loop may use it at a time. :meth:`close` ends the threads.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self.abandoned = 0
        """Number of abandoned calls."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._results = _Results()
        self._open: set[_Call] = set()
        self._threads = 0
        self._watched: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(*arguments)`` in a thread. Raises what it raises, and EnvTimeout after ``timeout_s``.

        If it raises EnvBusy, it is called again for as long, and meanwhile takes no thread from the environments that
        it waits for. If the caller is cancelled, the call still runs to its end.
        """
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self.timeout_s, 0.1
        while True:
            try:
                return await self._run(loop, function, *arguments)
            except EnvBusy:
                if loop.time() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def _run(self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> Any:
        call = _Call(function, arguments, loop.create_future())
        self._open.add(call)
        if self._threads < min(self.workers, len(self._open)):
            self._start_worker()
        self._calls.put(call)
        if self._watched is not loop:
            self._watched = loop
            loop.call_later(self._interval, self._abandon_hung, loop)
        try:
            return await call.future
        finally:
            self._open.discard(call)

    def close(self) -> None:
        """End each thread when it is idle."""
        for _ in range(self._threads):
            self._calls.put(None)
        self._threads = 0

    @property
    def _interval(self) -> float:
        return min(1.0, self.timeout_s / 4)

    def _start_worker(self) -> None:
        self._threads += 1
        _Worker(self._calls, self._results).start()

    def _abandon_hung(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for call in list(self._open):
            started = call.started
            if started is not None and now - started > self.timeout_s and not call.future.done():
                assert call.worker is not None
                call.worker.abandoned = True
                self.abandoned += 1
                self._threads -= 1
                self._start_worker()
                call.future.set_exception(EnvTimeout(f"the call did not return within {self.timeout_s:g} s"))
        if self._open:
            loop.call_later(self._interval, self._abandon_hung, loop)
        else:
            self._watched = None
