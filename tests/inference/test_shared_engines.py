"""Engines that tests share: each user gets one that answers, bit for bit, as when it was started."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support import engines as shared
from tests.support.engines import PROBE, tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]


def change(engines, pool, model):
    """Leave an engine with the weights of ``model``, another version, a cached prefix and a frozen request."""
    engine = pool.slots[0].engine

    async def work():
        await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        await engine.set_version("changed")
        await engine.score(PROBE)
        running = asyncio.create_task(engine.generate("left", PROBE[:20], {"max_tokens": 400, "ignore_eos": True}))
        await asyncio.sleep(0.3)
        await engine.pause()
        return running

    return engines.loop(work())


def test_the_next_user_gets_an_engine_as_it_was_started(engines, tiny_moe):
    settings = tiny_settings(tiny_moe["A"])
    with engines.pool(settings) as pool:
        processes = pool.slots[0].engine.process_ids()
        left = change(engines, pool, tiny_moe["B"])
        changed = engines.loop(pool.slots[0].engine._llm.get_weight_version())
    with engines.pool(settings) as pool:
        engine = pool.slots[0].engine
        assert engine.process_ids() == processes and changed == "changed"
        assert engines.answers(engine) == engines.first_answers(settings)
        assert engines.loop(engine.version()) == "initial" and left.done()
        engines.loop(engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_moe["B"])}))
        assert (
            engines.answers(engine)
            == engines.first_answers(tiny_settings(tiny_moe["B"]))
            != (engines.first_answers(settings))
        )


def test_a_reset_that_leaves_weights_is_noticed(engines, tiny_moe, monkeypatch):
    async def forgets(engine):
        await engine.pause("abort")
        await engine.resume()

    settings = tiny_settings(tiny_moe["A"])
    with engines.pool(settings) as pool:
        change(engines, pool, tiny_moe["B"])
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_as_started", forgets)
        with pytest.raises(AssertionError, match="is not what it was"), engines.pool(settings):
            pass
    with engines.pool(settings) as pool:
        assert engines.answers(pool.slots[0].engine) == engines.first_answers(settings)


def test_an_engine_that_was_killed_is_replaced(engines, tiny_moe):
    settings = tiny_settings(tiny_moe["A"])
    with engines.pool(settings) as pool:
        killed, started = pool.slots[0].engine.process_ids(), engines.starts
        os.kill(killed[-1], signal.SIGKILL)
    with engines.pool(settings) as pool:
        assert engines.starts == started + 1 and not set(killed) & set(pool.slots[0].engine.process_ids())
