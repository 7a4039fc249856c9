"""How often a lost engine is started again. The engine is a stand-in: real ones are lost in ``test_engines.py``."""

from __future__ import annotations

import asyncio


class Engine:
    async def start(self):
        pass

    async def kill(self):
        pass


def test_restarts_of_the_last_hour_count():
    from skyrl_megatron.inference.client import HOUR_S, HealthMonitor
    from skyrl_megatron.inference.engine_pool import EnginePool

    async def lose(pool, times):
        (slot,) = pool.slots
        monitor = HealthMonitor(pool, restarts_per_hour=2)
        for number in range(times):
            await pool.mark_dead(slot, f"lost for reason {number}")
            await monitor._restart(slot)
        return slot

    async def run():
        pool = EnginePool([Engine])
        await pool.start()
        slot = await lose(pool, 2)
        assert slot.state.value in ("serving", "paused") and len(slot.restarts) == 2
        slot.restarts[:] = [then - HOUR_S for then in slot.restarts]
        slot = await lose(pool, 3)
        assert slot.state.value == "dropped" and len(slot.restarts) == 4
        assert slot.why.endswith("after 2 restarts within an hour (generator.inference_engine.restarts_per_hour)")

    asyncio.run(run())
