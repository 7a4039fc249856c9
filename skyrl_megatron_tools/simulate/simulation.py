"""A run in simulated time: groups are sampled, batches are trained, weights are synced."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from skyrl_megatron.errors import ConfigError, Problem

Mode = Literal["sync", "one-step-off", "async"]
MODES: tuple[Mode, ...] = ("sync", "one-step-off", "async")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Lengths or times: constant (``std`` 0), log-normal, or drawn from ``values``; of these a ``straggler_share`` is
    ``straggler_factor`` times as large."""

    mean: float
    std: float = 0.0
    values: tuple[float, ...] = ()
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    most: float = float("inf")
    """Larger ones are cut to it."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return ``count`` of them, [count] float64."""
        drawn: np.ndarray
        if self.values:
            drawn = rng.choice(np.asarray(self.values), count)
        elif self.std > 0 and self.mean > 0:
            sigma2 = np.log1p(min(self.std / self.mean, 1e6) ** 2)
            drawn = rng.lognormal(np.log(self.mean) - sigma2 / 2, np.sqrt(sigma2), count)
        else:
            drawn = np.full(count, self.mean)
        if self.straggler_share:
            drawn = np.where(rng.random(count) < self.straggler_share, drawn * self.straggler_factor, drawn)
        cut: np.ndarray = np.minimum(drawn, self.most)
        return cut


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds that a token of each sequence takes, by how many an engine decodes at the same time: linear between the
    measured points, constant before the first one, and after the last one on as between the last two."""

    points: tuple[tuple[float, float], ...]
    """(sequences at the same time, seconds a token), by the former."""

    def table(self, most: int) -> list[float]:
        """Return the seconds at 0 … ``most`` sequences."""
        at, seconds = np.asarray(self.points, np.float64).T
        counts = np.arange(most + 1)
        found = np.interp(counts, at, seconds)
        if len(at) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (at[-1] - at[-2]), 0.0)
            found = np.where(counts > at[-1], seconds[-1] + slope * (counts - at[-1]), found)
        return [float(value) for value in found]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run to simulate. Times in seconds."""

    engines: int
    slots: int
    """Sequences that an engine decodes at the same time."""
    decode: DecodeCurve
    groups: int
    """Prompts of a step."""
    samples: int
    """Of a prompt."""
    tokens: Distribution
    """That are sampled of a trajectory, over all its turns."""
    train: float
    """All that a step takes beside sampling and sync: log-probs, advantages, optimizer steps, saving."""
    sync: float
    """Pause of the engines, new weights, and resume."""
    turns: int = 1
    env: Distribution = Distribution(0.0)
    """What the environment takes of a trajectory, over all its turns."""
    mode: Mode = "async"
    staleness: int = 1
    """Bound of ``async``: how many steps a group may be older than the version that it is trained on."""
    workers: int = 0
    """Groups that are sampled at the same time, in ``async``; 0: as many as the bound lets."""
    steps: int = 20
    warmup: int = 4
    """First steps that are left out of what is measured."""
    engine_gpus: int = 1
    trainer_gpus: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @property
    def bound(self) -> int:
        """Steps that a group may be behind."""
        return {"sync": 0, "one-step-off": 1, "async": self.staleness}[self.mode]

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.engines * self.engine_gpus + self.trainer_gpus

    def _problems(self) -> Sequence[Problem]:
        least = dict(engines=1, slots=1, groups=1, samples=1, turns=1, steps=1)
        found = [Problem(name, getattr(self, name), f"must be at least {n}") for name, n in least.items()]
        found = [problem for problem in found if int(str(problem.value)) < 1]
        for name in ("train", "sync", "staleness", "workers", "warmup", "engine_gpus", "trainer_gpus"):
            if not getattr(self, name) >= 0:
                found.append(Problem(name, getattr(self, name), "must be 0 or more"))
        if self.mode not in MODES:
            found.append(Problem("mode", self.mode, f"one of {', '.join(MODES)}"))
        if self.warmup >= self.steps:
            found.append(Problem("warmup", self.warmup, f"must be below steps={self.steps}"))
        if not self.decode.points or min(min(point) for point in self.decode.points) < 0:
            found.append(Problem("decode", self.decode.points, "needs points of sequences and seconds, 0 or more"))
        for name in ("tokens", "env"):
            one: Distribution = getattr(self, name)
            if not (one.mean >= 0 and one.std >= 0 and 0 <= one.straggler_share <= 1 and one.straggler_factor > 0):
                found.append(Problem(name, one, "needs mean and deviation of 0 or more, and a share within 0 and 1"))
        return found


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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came out. Shares and means are those of the steps after the warm-up."""

    mode: str
    step_seconds: float
    """Mean."""
    steps: tuple[float, ...]
    """Seconds of each step, the warm-up's included."""
    trainer_busy: float
    """Share of the time in which the trainer trains."""
    engines_busy: float
    """Share of the time in which an engine decodes anything, mean of all."""
    slots_used: float
    """Share of all slots that decode."""
    gpus_busy: float
    """Of ``trainer_busy`` and ``engines_busy``, weighed by GPUs."""
    sync_share: float
    """Of the time, in which engines stand still for new weights."""
    staleness_mean: float
    staleness_max: int
    staleness: dict[int, int]
    """Steps that a group is behind → groups."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    started: int
    """Groups of the whole run: begun, trained, finished and not trained, and still being sampled."""
    trained: int
    waiting: int
    running: int

    def as_dict(self) -> dict[str, Any]:
        """Return all of it by name."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    version: int
    left: int


class _Run:
    def __init__(self, plan: RunPlan) -> None:
        self.plan, self.clock = plan, Clock()
        self.engines, self.rng = SimulatedEngines(plan, self.clock), np.random.default_rng(plan.seed)
        self.version = self.started = 0
        self.finished: list[_Group] = []
        self.running: set[_Group] = set()
        by_version = plan.mode == "one-step-off"
        self.workers = plan.workers if plan.mode == "async" and plan.workers else plan.groups * (1 + plan.bound)
        self.workers = plan.groups if by_version else self.workers
        self.busy, self.draining = False, False
        self.ends: list[float] = []
        self.staleness: list[list[int]] = []

    def run(self) -> tuple[float, tuple[float, float, float]]:
        """Take all steps; returns (when the measured ones begin, what the fleet did since)."""
        begin, measured = 0.0, self.plan.warmup == 0
        self.fill()
        self.engines.settle()
        while self.version < self.plan.steps:
            alive = self.clock.next()
            assert alive, "nothing is left to happen"
            self.engines.settle()
            if not measured and self.version >= self.plan.warmup:
                begin, measured = self.clock.now, True
                self.engines.measure()
        return begin, self.engines.measure()

    def fill(self) -> None:
        """Begin as many groups as workers and bound let."""
        limit = (self.version + self.plan.bound + 1) * self.plan.groups
        while len(self.running) < self.workers and self.started < limit and not self.engines.paused:
            group = _Group(self.started, self.version, self.plan.samples)
            self.started += 1
            self.running.add(group)
            tokens = self.plan.tokens.draw(self.rng, self.plan.samples) / self.plan.turns
            env = self.plan.env.draw(self.rng, self.plan.samples) / self.plan.turns
            for length, seconds in zip(tokens.tolist(), env.tolist(), strict=True):
                self.decode(group, length, seconds, self.plan.turns)

    def decode(self, group: _Group, tokens: float, env: float, turns: int) -> None:
        """Sample the turns of a trajectory that are left."""

        def answered() -> None:
            if turns > 1:
                self.decode(group, tokens, env, turns - 1)
            else:
                self.end_trajectory(group)

        def sampled() -> None:
            if env:
                self.clock.at(self.clock.now + env, answered)
            else:
                answered()

        self.engines.submit(tokens, sampled)

    def end_trajectory(self, group: _Group) -> None:
        group.left -= 1
        if group.left:
            return
        self.running.remove(group)
        self.finished.append(group)
        self.fill()
        self.train()
        if self.draining and not self.running:
            self.sync()

    def train(self) -> None:
        """Begin a step, once there is a batch of which what it leaves can all be trained before it is too old."""
        if self.busy or len(self.finished) < self.plan.groups:
            return
        self.finished.sort(key=lambda group: (group.version, group.number))
        batch, left = self.finished[: self.plan.groups], self.finished[self.plan.groups :]
        if self.too_many_of_an_age([*left, *self.running]):
            return
        self.busy, self.finished = True, left
        self.staleness.append([self.version - group.version for group in batch])
        self.fill()
        self.clock.at(self.clock.now + self.plan.train, self.trained)

    def too_many_of_an_age(self, left: Sequence[_Group]) -> bool:
        """Whether later steps could not train all groups in time: of those that are too old after ``k`` more steps,
        there may be no more than these steps take."""
        versions = np.sort([group.version for group in left])
        last = self.version - self.plan.bound + np.arange(self.plan.bound + 1)
        return bool(np.any(np.searchsorted(versions, last, "right") > self.plan.groups * np.arange(len(last))))

    def trained(self) -> None:
        if self.plan.mode == "one-step-off" and self.running:
            self.draining = True
        else:
            self.sync()

    def sync(self) -> None:
        self.draining = False
        self.engines.pause()
        self.clock.at(self.clock.now + self.plan.sync, self.synced)

    def synced(self) -> None:
        self.ends.append(self.clock.now)
        self.version += 1
        self.engines.resume()
        self.busy = False
        if self.version < self.plan.steps:
            self.fill()
            self.train()


def simulate(plan: RunPlan) -> Prediction:
    """Return what a run of the plan would do. The same plan gives the same answer."""
    run = _Run(plan)
    begin, (busy, held, tokens) = run.run()
    seconds = run.ends[-1] - begin
    steps = np.diff(run.ends, prepend=0.0)
    measured = plan.steps - plan.warmup
    trainer, engines = measured * plan.train / seconds, busy / seconds / plan.engines
    stale = np.concatenate(run.staleness[plan.warmup :])
    values, counts = np.unique(stale, return_counts=True)
    weighed = trainer * plan.trainer_gpus + engines * plan.engines * plan.engine_gpus
    return Prediction(
        mode=plan.mode,
        step_seconds=seconds / measured,
        steps=tuple(steps.tolist()),
        trainer_busy=trainer,
        engines_busy=engines,
        slots_used=held / seconds / plan.engines / plan.slots,
        gpus_busy=weighed / plan.gpus if plan.gpus else 0.0,
        sync_share=measured * plan.sync / seconds,
        staleness_mean=float(stale.mean()),
        staleness_max=int(stale.max()),
        staleness={int(value): int(count) for value, count in zip(values, counts, strict=True)},
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_gpu=tokens / seconds / plan.gpus if plan.gpus else 0.0,
        started=run.started,
        trained=plan.steps * plan.groups,
        waiting=len(run.finished),
        running=len(run.running),
    )
