"""What real engines do when a request ends them in mid-generation, and when a process of theirs hangs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest

from tests.support.engines import tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.engines("lost")]
NOTICED_S = 10.0
ANSWER_S = 50.0
PROMPT = [5, 6]


@pytest.fixture(scope="module")
def pool(engines, tiny_moe):
    extra = {"logits_processors": ["tests.inference.steps:Steps"]}
    with engines.pool(tiny_settings(tiny_moe["A"], extra=extra), wait_s=580) as pool:
        yield pool


@pytest.fixture
def slot(pool):
    (slot,) = pool.slots
    slot.restarts.clear()
    return slot


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop


def step(tokens, what, seconds=0.0):
    """Sampling parameters of a request that does something unusual once it has so many tokens."""
    return {"max_tokens": 60, "ignore_eos": True, "extra_args": {"step": [tokens, what, seconds]}}


async def until(condition):
    async with asyncio.timeout(ANSWER_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_one_that_ends_its_engine_in_mid_generation_is_refused_and_those_beside_it_are_answered(pool, slot, loop):
    from skyrl_megatron.errors import RequestError
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient

    client, monitor = InferenceClient(pool), HealthMonitor(pool, interval_s=0.2)

    async def work():
        monitor.start()
        try:
            prompts = [[9, at] for at in range(6)]
            beside = asyncio.create_task(client.generate(prompts, {"max_tokens": 300, "ignore_eos": True}))
            await until(lambda: slot.in_flight)
            with pytest.raises(RequestError, match=r"killed two engines.*2 tokens .*\[5, 6\].*'step': \[40, 'end'"):
                await client.sample(PROMPT, step(40, "end"))
            samples = await beside
            await until(lambda: slot.state.value == "serving")
            return samples
        finally:
            await monitor.stop()

    assert [len(sample.token_ids) for sample in loop(work(), 600)] == [300] * 6
    assert len(slot.restarts) == 2


HANGS = {
    "core stopped": (0, {}, NOTICED_S, "process .* is stopped"),
    "worker stopped": (-1, {}, NOTICED_S, "process .* is stopped"),
    "worker waits": (None, {"timeout_s": 8.0}, 20.0, "no answer within 8 s"),
}
"""Which process is stopped, what the monitor is changed to, when it is noticed, why. A worker that waits for a lock
looks as one that waits for its GPU: it has the time of the longest step."""


@pytest.mark.parametrize("hang", HANGS)
def test_one_that_hangs_is_noticed_and_its_request_is_answered(pool, slot, loop, hang):
    """As a run looks after its engines, from the time on that a request makes no progress; it is started again."""
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient

    process, changes, within_s, said = HANGS[hang]
    client, monitor = InferenceClient(pool), HealthMonitor(pool, **changes)
    sampling = step(1, "sleep", 200.0) if process is None else {"max_tokens": 300}

    async def work():
        monitor.start()
        try:
            asked = asyncio.create_task(client.sample(PROMPT, sampling))
            await until(lambda: slot.in_flight)
            began = time.monotonic()
            if process is not None:
                os.kill(slot.engine.process_ids()[process], signal.SIGSTOP)
            await until(lambda: slot.state.value == "dead")
            noticed, why = time.monotonic() - began, slot.why
            if process is None:
                asked.cancel()  # it would hang the next one too
            else:
                assert len((await asked).token_ids) > 0
            await until(lambda: slot.state.value == "serving")
            return noticed, why
        finally:
            await monitor.stop()

    noticed, why = loop(work(), 600)
    assert noticed <= within_s
    assert re.search(said, why), why


def test_a_long_step_is_no_hang(pool, slot, loop):
    """Of 15 s, in which the engine answers nobody."""
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient

    client, monitor = InferenceClient(pool), HealthMonitor(pool)

    async def work():
        monitor.start()
        try:
            began = time.monotonic()
            sample = await client.sample(PROMPT, step(3, "compute", 15.0))
            return len(sample.token_ids), time.monotonic() - began
        finally:
            await monitor.stop()

    tokens, took = loop(work(), 600)
    assert tokens == 60 and took >= 15 and not slot.restarts
