"""Watching over engines: a dead or hung one is noticed, its requests go elsewhere, and it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from skyrl_megatron.errors import EngineError, EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.pool import EnginePool, EngineSlot, EngineState, same_failure

log = logging.getLogger(__name__)
HOUR_S = 3600.0
SILENT_S = 60.0
"""How long an engine may be silent: longer than any of its steps takes."""


class HealthMonitor:
    """Asks every engine every ``interval_s``; one that fails, or does not answer within ``timeout_s``, is killed and
    restarted, or dropped if it was ``restarts_per_hour`` times within the last hour.

    A probe goes through the engine's core to every worker and back, and finds processes that died. It waits for the
    engine's current step, so ``timeout_s`` must be longer than any step; a process that is stopped is told apart from
    a long step, and noticed within 10 s (:mod:`~skyrl_megatron.inference.vllm.stopped`).
    ``sync_engine(slot)`` gives a restarted engine the published weights; without it such an engine stays paused
    until the next sync.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        interval_s: float = 3.0,
        timeout_s: float = SILENT_S,
        restarts_per_hour: int = 3,
        sync_engine: Callable[[EngineSlot], Awaitable[None]] | None = None,
    ) -> None:
        self.pool, self.interval_s, self.timeout_s = pool, interval_s, timeout_s
        self.restarts_per_hour, self.sync_engine = restarts_per_hour, sync_engine
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}  # why engines stay paused, by their names

    def start(self) -> None:
        """Watch in the background."""
        self._task = asyncio.create_task(self._watch(), name="engine health")

    async def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.check()
            except Exception:  # without a watch the next dead engine would hold up its requests for long
                log.exception("looking after the engines failed, tried again in %g s", self.interval_s)

    async def check(self) -> None:
        """Probe every engine once and restart those that are dead. Waits while a sync is under way; engines that sleep
        are left to the sync that will wake them."""
        async with self.pool.changing:
            if self.pool.asleep:
                return
            going = (EngineState.DROPPED, EngineState.LEAVING)
            watched = [slot for slot in self.pool.slots if slot.state not in going]
            await asyncio.gather(*(self._probe(slot) for slot in watched))
            dead = [slot for slot in watched if slot.state is EngineState.DEAD]
            await asyncio.gather(*(self._restart(slot) for slot in dead))
            if self.sync_engine is not None:
                for slot in self.pool.alive():
                    if slot.version != self.pool.published:
                        await self._update(slot, self.sync_engine)

    async def _probe(self, slot: EngineSlot) -> None:
        if slot.state is EngineState.DEAD:
            return
        try:
            version = await slot.probe(self.timeout_s)
        except EngineGoneError as error:
            await self._mark_dead(slot, str(error))
        else:
            if version != slot.version or slot.state is EngineState.PAUSED:
                self.pool.serve(slot, version)  # if it was only suspected; it stays paused with other weights

    async def _mark_dead(self, slot: EngineSlot, why: str) -> None:
        lost = len(slot.in_flight)
        await self.pool.mark_dead(slot, why)
        log.warning("%s %s; its %d requests go to other engines", slot.name, why, lost)

    async def _restart(self, slot: EngineSlot) -> None:
        recent = sum(time.monotonic() - then < HOUR_S for then in slot.restarts)
        if recent >= self.restarts_per_hour:
            why = f"{slot.why}, after {recent} restarts within an hour (generator.inference_engine.restarts_per_hour)"
            await self.pool.mark_dead(slot, why, EngineState.DROPPED)
            log.error("%s is dropped: %s", slot.name, slot.why)
            return
        try:
            await self.pool.restart(slot)
            log.warning("%s was restarted (%d of %d within an hour)", slot.name, recent + 1, self.restarts_per_hour)
        except EngineError as error:
            if same_failure(str(error), slot.why):
                await self.pool.drop(slot, f"a restart changes nothing: {error}")
                log.error("%s is dropped: %s", slot.name, slot.why)
                return
            slot.why, slot.state = str(error), EngineState.DEAD
            log.warning("%s could not be restarted: %s", slot.name, error)

    async def _update(self, slot: EngineSlot, sync_engine: Callable[[EngineSlot], Awaitable[None]]) -> None:
        try:
            await sync_engine(slot)
        except SkyRLMegatronError as error:
            if self._told.get(slot.name) != str(error):  # the same every time, until the next sync
                log.warning("%s stays paused, its weights could not be updated: %s", slot.name, error)
            self._told[slot.name] = str(error)
        else:
            self._told.pop(slot.name, None)
