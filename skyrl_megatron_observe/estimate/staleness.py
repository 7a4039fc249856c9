"""How stale batches are on paper: the queue of an asynchronous run itself, fed with the seconds of the estimate.

The run's own :class:`~skyrl_megatron.sources.rollout_stream.RolloutStream` runs on an event loop whose time passes
at once. Groups take the time that engines need for as many of them as the limits allow, and stand still during a sync.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from skyrl_megatron.sources.group import Group
from skyrl_megatron.sources.rollout_stream import RolloutStream, StreamLimits

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.rollout.interface import GeneratorOutput

STEPS = 24
"""Steps that are counted, after those in which the queue fills."""
MAX_GROUPS = 32
"""Groups of a step. More do not change the result: only their ratio to the concurrent ones does."""
NO_TIMEOUT_S = 1e12


@dataclass(frozen=True, slots=True)
class RunAhead:
    """What the queue of an asynchronous run does in its steady state."""

    step_s: float
    """Mean time of a step in seconds, sync included."""
    mean: float
    """Mean staleness of a group in steps: the version that it trains minus the version that began to sample it."""
    most: int
    """Largest staleness of a group, in steps."""


def stream_limits(cfg: SkyRLTrainConfig) -> StreamLimits:
    """Return the limits of an asynchronous run's queue, with at most :data:`MAX_GROUPS` groups a step."""
    ahead, groups = cfg.trainer.fully_async, cfg.trainer.train_batch_size
    batch = min(groups, MAX_GROUPS)
    workers = max(round(ahead.num_parallel_generation_workers * batch / groups), 1)
    return StreamLimits(
        batch=batch, steps=0, bound=ahead.max_staleness_steps, workers=workers, ahead=ahead.batches_ahead
    )


def groups_in_flight(cfg: SkyRLTrainConfig) -> int:
    """Return how many groups engines sample at the same time, at most."""
    ahead = cfg.trainer.fully_async
    return min(ahead.num_parallel_generation_workers, cfg.trainer.train_batch_size * (ahead.max_staleness_steps + 1))


def run_ahead(limits: StreamLimits, group_s: Callable[[int], float], train_s: float, sync_s: float) -> RunAhead:
    """Run the queue. ``limits``: its steps and timeout are replaced. ``group_s``: seconds to sample a group by its
    number; ``train_s``, ``sync_s``: seconds of a step without sampling and sync, and of a sync."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(_train(limits, group_s, train_s, sync_s))


async def _train(limits: StreamLimits, group_s: Callable[[int], float], train_s: float, sync_s: float) -> RunAhead:
    filling = limits.bound + 4
    steps, synced = filling + STEPS, 0
    one_row = cast("GeneratorOutput", {"loss_masks": [[1]]})

    async def sample(group: Group) -> GeneratorOutput:
        before = synced
        await asyncio.sleep(group_s(group.number))
        while before < synced:  # engines stood still meanwhile, and may again
            missed, before = synced - before, synced
            await asyncio.sleep(missed * sync_s)
        return one_row

    endless = StreamLimits(
        batch=limits.batch,
        steps=steps + limits.bound + 1,
        bound=limits.bound,
        workers=limits.workers,
        timeout_s=NO_TIMEOUT_S,
        ahead=limits.ahead,
    )
    stream = RolloutStream(sample, lambda number: {"uid": str(number)}, endless)
    stream.start(0)
    loop, began, staleness = asyncio.get_running_loop(), 0.0, list[int]()
    for version in range(steps):
        if version == filling:
            began = loop.time()
        groups = await stream.take()
        if version >= filling:
            staleness += stream.staleness(groups)
        await asyncio.sleep(train_s)
        stream.trained(groups)
        await asyncio.sleep(sync_s)
        synced += 1
        stream.advance(version + 1)
    step_s = (loop.time() - began) / STEPS
    await stream.close()
    return RunAhead(step_s, sum(staleness) / len(staleness), max(staleness))


class _Selector(selectors.SelectSelector):
    """Puts the clock of its loop forward instead of waiting."""

    loop: _VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits for another one"
            self.loop.now += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop at time ``now``, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now
