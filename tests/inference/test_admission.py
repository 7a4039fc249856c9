"""Which engine gets a request, which request is next, and how those of a session are aborted.

The engines are stand-ins that hold requests until a test lets them go: real ones answer at times of their own.
"""

from __future__ import annotations

import asyncio

import pytest


class Engine:
    """Holds requests; ``abort`` and ``release`` answer them."""

    def __init__(self):
        self.held: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.admitted: list[list[int]] = []
        self.answer = 4

    async def start(self):
        pass

    async def shutdown(self):
        pass

    async def generate(self, request_id, prompt_token_ids, sampling):
        from skyrl_megatron.inference.protocol import Generation

        self.admitted.append(list(prompt_token_ids))
        self.held[request_id] = asyncio.Event()
        await self.held[request_id].wait()
        del self.held[request_id]
        tokens = [7] * (2 if request_id in self.aborted else self.answer)
        return Generation(tokens, [-1.0] * len(tokens), "abort" if request_id in self.aborted else "stop")

    async def abort(self, request_id):
        self.aborted.add(request_id)
        self.release(request_id)

    def release(self, *request_ids):
        for request_id in request_ids or list(self.held):
            self.held[request_id].set()


async def pool_of(count):
    from skyrl_megatron.inference.engine_pool import EnginePool

    pool = EnginePool([Engine] * count)
    await pool.start()
    return pool


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("engines", [2, 4])
def test_engines_get_equal_parts_of_the_predicted_kv_cache(engines):
    """Long prompts in turn with short ones: by number of requests, all long ones would be on the same engines."""

    async def run():
        from skyrl_megatron.inference.client import InferenceClient

        pool = await pool_of(engines)
        client = InferenceClient(pool)
        prompts = [[5] * (900 if at % engines == 0 else 20 + at) for at in range(engines * 16)]
        sessions = [f"{at}_0" for at in range(len(prompts))]
        work = asyncio.create_task(client.generate(prompts, {"max_tokens": 100}, sessions))
        await settled()
        loads = [slot.load for slot in pool.slots]
        tokens = [sum(len(prompt) + 100 for prompt in slot.engine.admitted) for slot in pool.slots]
        assert loads == tokens and max(loads) < 1.25 * min(loads)
        assert max(loads) - min(loads) <= 1000, "less than a request apart"
        for slot in pool.slots:
            slot.engine.release()
        await work
        assert [slot.load for slot in pool.slots] == [0] * engines
        later = asyncio.create_task(client.generate([[5] * 10], {"max_tokens": 100}, ["again"]))
        await settled()
        assert sum(slot.load for slot in pool.slots) == 10 + 4, "answers had 4 tokens so far"
        for slot in pool.slots:
            slot.engine.release()
        await later

    asyncio.run(run())


def test_requests_that_wait_are_admitted_in_their_order():
    """Also if others ask at the moment when a place becomes free."""

    async def run():
        from skyrl_megatron.inference.client import InferenceClient

        pool = await pool_of(1)
        (engine,) = (slot.engine for slot in pool.slots)
        client = InferenceClient(pool, max_in_flight=2)

        def ask(number):
            return asyncio.create_task(client.sample([number], {"max_tokens": 9}, f"{number}"))

        asked = [ask(number) for number in range(1, 7)]
        await settled()
        assert engine.admitted == [[1], [2]]
        asked[3].cancel()  # the fourth waits no longer
        for first in (7, 47, 87):
            engine.release(next(iter(engine.held)))
            for number in range(first, first + 40):
                asked.append(ask(number))
                await asyncio.sleep(0)
        while engine.held:
            engine.release()
            await settled()
        assert [prompt for (prompt,) in engine.admitted] == [1, 2, 3, 5, 6, *range(7, 127)]
        await asyncio.gather(*asked, return_exceptions=True)
        assert client._limit._used == 0

    asyncio.run(run())


def test_the_requests_of_sessions_are_aborted():
    async def run():
        from skyrl_megatron.inference.client import InferenceClient

        pool = await pool_of(2)
        client = InferenceClient(pool)
        work = asyncio.create_task(client.generate([[1]] * 4, {"max_tokens": 9}, ["a", "b", "c", "d"]))
        await settled()
        await client.abort(["b", "d", "unknown"])
        await settled()
        for slot in pool.slots:
            slot.engine.release()
        answers = await work
        assert [answer.finish_reason for answer in answers] == ["stop", "abort", "stop", "abort"]
        assert [len(answer.token_ids) for answer in answers] == [4, 2, 4, 2]
        assert not client._sampling
        await client.abort(["a"])

    asyncio.run(run())
