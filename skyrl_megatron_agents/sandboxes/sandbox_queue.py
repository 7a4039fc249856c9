"""A fair queue for sandboxes, and the choice of their provider.

At most so many run at once, and no trajectory or group waits for another's whole queue. Groups take turns: of those
that wait, the next place goes to the one that holds the fewest, and among these to the one whose last place was given
longest ago. Within a group, first come, first served. So a group of 64 attempts delays a group of eight that comes
later by one attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.errors import ConfigError, Problem, SandboxError, SandboxStartError
from skyrl_megatron.plugins import SANDBOXES
from skyrl_megatron_agents.sandboxes.sandbox import Limits, Sandbox, SandboxProvider, SandboxSpec

WAIT_S = 3600.0
"""Time in seconds that an attempt waits for a place before that is an error of the infrastructure."""


@dataclass
class QueueCounts:
    """Numbers for metrics.

    ``started``, ``failed``: sandboxes that did and did not start. ``waited_s``: the sum of the waits for a place, in
    seconds. ``most``: the largest number at once.
    """

    started: int = 0
    failed: int = 0
    waited_s: float = 0.0
    most: int = 0


@dataclass(eq=False)
class _Waiting:
    group: str
    spec: Limits
    place: asyncio.Future[None]
    since: float = field(default_factory=time.monotonic)


class SandboxQueue:
    """Sandboxes of one provider for all trajectories of this process.

    ``at_once``: sandboxes at the same time. ``memory``: bytes that the limits of all of them (memory and disk) may add
    up to; None: without a limit. ``tries``: how often a sandbox that does not start is tried. All calls come from one
    event loop.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        at_once: int,
        memory: int | None = None,
        tries: int = 2,
        wait_s: float = WAIT_S,
    ) -> None:
        wrong = [name for name, value in (("at_once", at_once), ("tries", tries)) if value < 1]
        if wrong:
            raise ConfigError([Problem(f"sandbox queue {name}", 0, "set it to at least 1") for name in wrong])
        self.provider = provider
        self.counts = QueueCounts()
        self._at_once, self._memory, self._tries, self._wait_s = at_once, memory, tries, wait_s
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._held: Counter[str] = Counter()
        self._given: dict[str, int] = {}
        self._turn = 0
        self._used = 0

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, group: str = "") -> AsyncIterator[Sandbox]:
        """Wait for a place of ``group``, start a sandbox, and stop it after the block.

        Raises SandboxStartError if no place is free in time or the sandbox does not start, and at once if its limits
        alone exceed ``memory``.
        """
        async with self._place(spec.limits, group):
            sandbox = await self._start(spec)
            try:
                yield sandbox
            finally:
                await asyncio.shield(sandbox.stop())

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        for left in reversed(range(self._tries)):
            try:
                sandbox = await self.provider.start(spec)
            except SandboxError as error:
                self.counts.failed += 1
                if not left:
                    raise SandboxStartError(str(error)) from error
            else:
                self.counts.started += 1
                return sandbox
        raise AssertionError("at least one try")

    @contextlib.asynccontextmanager
    async def _place(self, limits: Limits, group: str) -> AsyncIterator[None]:
        need = limits.memory + limits.disk
        if self._memory is not None and need > self._memory:
            raise SandboxStartError(
                f"a sandbox with memory and disk of {need:,} bytes exceeds the {self._memory:,} of all: lower its "
                "limits.memory or limits.disk"
            )
        waiting = _Waiting(group, limits, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(group, deque()).append(waiting)
        self._give_places()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.place
        except BaseException as error:
            if waiting.place.done() and not waiting.place.cancelled():
                self._release(waiting)  # given in the moment of the cancellation
            else:
                self._leave(waiting)
                self._give_places()
            if isinstance(error, TimeoutError):
                why = f"no sandbox was free within {self._wait_s:g} s: raise their number or lower their limits"
                raise SandboxStartError(why) from None
            raise
        self.counts.waited_s += time.monotonic() - waiting.since
        try:
            yield
        finally:
            self._release(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        queue = self._waiting.get(waiting.group)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._waiting[waiting.group]
                self._forget(waiting.group)

    def _give_places(self) -> None:
        while self._waiting and self._held.total() < self._at_once:
            group = min(self._waiting, key=lambda name: (self._held[name], self._given.get(name, 0)))
            first = self._waiting[group][0]
            need = first.spec.memory + first.spec.disk
            if self._memory is not None and self._used + need > self._memory:
                return  # smaller ones do not overtake, or the large one waits forever
            self._held[group] += 1
            self._leave(first)
            self._used += need
            self._turn += 1
            self._given[group] = self._turn
            self.counts.most = max(self.counts.most, self._held.total())
            first.place.set_result(None)

    def _release(self, waiting: _Waiting) -> None:
        self._held[waiting.group] -= 1
        self._held += Counter()  # drop groups with none
        self._forget(waiting.group)
        self._used -= waiting.spec.memory + waiting.spec.disk
        self._give_places()

    def _forget(self, group: str) -> None:
        """Drop the turn of a group that neither waits nor holds a place."""
        if group not in self._held and group not in self._waiting:
            self._given.pop(group, None)


def default_at_once(limits: Limits, share: float = 0.5) -> int:
    """Return how many sandboxes with these limits fit on this machine at once: its cores, and a share of its
    memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share
    cores = len(os.sched_getaffinity(0))
    return max(1, min(int(memory / (limits.memory + limits.disk)), int(2 * cores / limits.cpus)))


def make_provider(name: str, **options: Any) -> SandboxProvider:
    """Return a provider by its registered name, after it removed what earlier runs left.

    Raises ConfigError for an unknown name, and SandboxError if the provider cannot run on this machine.
    """
    provider: SandboxProvider = SANDBOXES.require(name)(**options)
    if reason := provider.problem():
        raise SandboxError(f"sandboxes of provider {name!r} cannot run here: {reason}")
    provider.reap()
    return provider


def why_not_here(name: str) -> str | None:
    """Return why a provider cannot run on this machine; None if it can. Starts nothing that stays."""
    try:
        provider = make_provider(name)
    except SandboxError as error:
        return str(error)
    asyncio.run(provider.close())
    return None
