"""The event loop beside the trainer's thread."""

import threading
from concurrent.futures import CancelledError

import pytest


def test_work_goes_on_while_the_caller_computes():
    import asyncio

    from skyrl_megatron.trainer.event_loop import LoopThread

    ticked, ended = threading.Event(), threading.Event()

    async def watch():
        try:
            while True:
                await asyncio.sleep(0)
                ticked.set()
        finally:
            ended.set()

    async def begin():
        return asyncio.create_task(watch())

    async def fails():
        raise ValueError("its own error")

    with LoopThread() as loop:
        task = loop.run(begin())
        ticked.clear()
        assert ticked.wait(10), "the watch stands still between two calls"
        with pytest.raises(ValueError, match="its own error"):
            loop.run(fails())
    assert ended.is_set() and task.cancelled(), "what is under way at the end is cancelled"


def test_a_signal_cancels_what_is_under_way():
    import asyncio
    import os
    import signal

    from skyrl_megatron.trainer.event_loop import LoopThread
    from skyrl_megatron.trainer.stopping import StopRequested, StopSignal

    cancelled = threading.Event()

    async def work():
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with StopSignal() as stop, LoopThread() as loop:
        with pytest.raises(StopRequested):
            loop.run(work(), stop=stop)
        assert cancelled.is_set()
        with pytest.raises(CancelledError):
            loop.run(_cancelled())


async def _cancelled():
    import asyncio

    raise asyncio.CancelledError
