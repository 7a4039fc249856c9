"""Engines that decode: each runs all its sequences at one pace, which depends on how many there are."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from skyrl_megatron.trainer.simulate.plan import RunPlan

_NEAR = 1e-9
"""Tokens: ends that are as near as this are the same moment."""


class Clock:
    """The simulated time, in seconds, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def next(self) -> bool:
        """Let the next thing happen; whether there was one."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


class _Engine:
    """``done`` counts the tokens that each sequence here would have had, had it been here from the start."""

    __slots__ = ("busy", "done", "ends", "held", "since", "stamp", "tokens")

    def __init__(self) -> None:
        self.done = self.since = 0.0
        self.ends: list[tuple[float, int, Callable[[], None]]] = []
        self.stamp = 0
        self.busy = self.held = self.tokens = 0.0


class SimulatedEngines:
    """All engines, and the requests that wait for a free slot, first come first served by the least loaded."""

    def __init__(self, plan: RunPlan, clock: Clock) -> None:
        self._clock, self._slots = clock, plan.slots
        self._pace = plan.decode.table(plan.slots)
        self._engines = [_Engine() for _ in range(plan.engines)]
        self._loads = [(0, place) for place in range(plan.engines)]
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._changed: set[int] = set()
        self._count = 0
        self.paused = False

    def submit(self, tokens: float, done: Callable[[], None]) -> None:
        """Decode a sequence; ``done`` is called when it ends."""
        self._waiting.append((tokens, done))

    def pause(self) -> None:
        """Stop all engines where they are."""
        self._advance_all()
        self.paused = True

    def resume(self) -> None:
        """Go on."""
        self._advance_all()
        self.paused = False
        self._changed.update(range(len(self._engines)))

    def settle(self) -> None:
        """Give waiting requests to engines and plan what happens next; to be called after every event."""
        while self._waiting and (place := self._least_loaded()) is not None:
            tokens, done = self._waiting.popleft()
            engine = self._engines[place]
            self._advance(engine)
            self._count += 1
            heapq.heappush(engine.ends, (engine.done + tokens, self._count, done))
            heapq.heappush(self._loads, (len(engine.ends), place))
            self._changed.add(place)
        if not self.paused:
            for place in self._changed:
                self._plan(place)
            self._changed.clear()

    def measure(self) -> tuple[float, float, float]:
        """Return (seconds with anything to decode, seconds of all slots in use, tokens) of all engines since the last
        call."""
        self._advance_all()
        total = [sum(getattr(engine, name) for engine in self._engines) for name in ("busy", "held", "tokens")]
        for engine in self._engines:
            engine.busy = engine.held = engine.tokens = 0.0
        return total[0], total[1], total[2]

    def _least_loaded(self) -> int | None:
        while self._loads:
            load, place = self._loads[0]
            if load == len(self._engines[place].ends):
                if load >= self._slots:
                    return None
                heapq.heappop(self._loads)
                return place
            heapq.heappop(self._loads)  # it has changed since, and is there once more
        return None

    def _advance(self, engine: _Engine) -> None:
        seconds, count = self._clock.now - engine.since, len(engine.ends)
        engine.since = self._clock.now
        if count and seconds and not self.paused:
            pace = self._pace[count]
            tokens = seconds / pace if pace else 0.0
            engine.done += tokens
            engine.busy, engine.held = engine.busy + seconds, engine.held + seconds * count
            engine.tokens += tokens * count

    def _advance_all(self) -> None:
        for engine in self._engines:
            self._advance(engine)

    def _plan(self, place: int) -> None:
        engine = self._engines[place]
        self._advance(engine)
        engine.stamp += 1
        if engine.ends:
            left = max(engine.ends[0][0] - engine.done, 0.0)
            stamp = engine.stamp
            self._clock.at(self._clock.now + left * self._pace[len(engine.ends)], lambda: self._end(place, stamp))

    def _end(self, place: int, stamp: int) -> None:
        engine = self._engines[place]
        if stamp != engine.stamp or self.paused:
            return
        self._advance(engine)
        limit = max(engine.done, engine.ends[0][0]) + _NEAR
        while engine.ends and engine.ends[0][0] <= limit:
            _, _, done = heapq.heappop(engine.ends)
            done()
        heapq.heappush(self._loads, (len(engine.ends), place))
        self._changed.add(place)
