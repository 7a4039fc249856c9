"""An engine that does not answer: does it take a long step, or is a process of it stopped (SIGSTOP, a debugger)?

A step may take longer than an engine that hangs should be waited for. A process that is stopped answers nobody, and
the kernel says so; it is never a long step. Processor time does not tell the two apart: workers sleep while a GPU
computes (``torch.cuda.Event(blocking=True)``), as they do in a deadlock. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

import psutil

from skyrl_megatron.errors import EngineGoneError

LOOK_S = 1.0
LOOKS = 5
"""At which a process was stopped, one after the other. They are counted, not timed: this process may have been stopped
together with the engine, and the looks in between did not take place then."""


async def unless_stopped[T](answer: Awaitable[T], processes: Sequence[psutil.Process]) -> T:
    """Await what an engine answers. Raises EngineGoneError once a process of it stays stopped."""
    asked = asyncio.ensure_future(answer)
    stopped: dict[int, int] = {}
    try:
        while not (await asyncio.wait([asked], timeout=LOOK_S))[0]:
            stopped = {process: stopped.get(process, 0) + 1 for process in _stopped(processes)}
            if LOOKS in stopped.values():
                process = max(stopped, key=lambda each: stopped[each])
                raise EngineGoneError(f"hangs: process {process} is stopped, for {LOOKS * LOOK_S:g} s so far")
        return await asked
    finally:
        asked.cancel()


def _stopped(processes: Sequence[psutil.Process]) -> list[int]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.append(process.pid)
    return found
