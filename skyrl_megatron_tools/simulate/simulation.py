"""Discrete-event simulation of a run: engines sample groups, the trainer trains batches, and weights are synced."""

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
    """A distribution of lengths or times: constant (``std`` 0), log-normal, or drawn from ``values``.

    A ``straggler_share`` of the drawn values is multiplied by ``straggler_factor``.
    """

    mean: float
    std: float = 0.0
    values: tuple[float, ...] = ()
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    most: float = float("inf")
    """Upper limit: larger values are clipped."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw values [count] float64."""
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
    """Seconds per token of each sequence, by the number of sequences that an engine decodes concurrently.

    Linear between measured points, constant below the first one, and extrapolated above the last one.
    """

    points: tuple[tuple[float, float], ...]
    """(concurrent sequences, seconds per token), sorted."""

    def table(self, most: int) -> list[float]:
        """Return the seconds per token at 0 … ``most`` sequences."""
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
    """Sequences that an engine decodes concurrently."""
    decode: DecodeCurve
    groups: int
    """Prompts per step."""
    samples: int
    """Samples per prompt."""
    tokens: Distribution
    """Sampled tokens of a trajectory, over all its turns."""
    train: float
    """Time of a step without sampling and sync: log-probs, advantages, optimizer steps, saving."""
    sync: float
    """Time to pause the engines, load new weights, and resume."""
    turns: int = 1
    env: Distribution = Distribution(0.0)
    """Environment time of a trajectory, over all its turns."""
    mode: Mode = "async"
    staleness: int = 1
    """For ``async``: the largest number of steps from the version that sampled a group to the version that it trains.
    """
    workers: int = 0
    """For ``async``: groups that are sampled concurrently; 0: as many as the staleness bound allows."""
    steps: int = 20
    warmup: int = 4
    """First steps to exclude from the prediction."""
    engine_gpus: int = 1
    trainer_gpus: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @property
    def bound(self) -> int:
        """Largest staleness of a group, in steps."""
        return {"sync": 0, "one-step-off": 1, "async": self.staleness}[self.mode]

    @property
    def gpus(self) -> int:
        """Number of all GPUs."""
        return self.engines * self.engine_gpus + self.trainer_gpus

    def _problems(self) -> Sequence[Problem]:
        least = dict(engines=1, slots=1, groups=1, samples=1, turns=1, steps=1)
        found = [Problem(name, getattr(self, name), f"must be at least {n}") for name, n in least.items()]
        found = [problem for problem in found if int(str(problem.value)) < 1]
        for name in ("train", "sync", "staleness", "workers", "warmup", "engine_gpus", "trainer_gpus"):
            if not getattr(self, name) >= 0:
                found.append(Problem(name, getattr(self, name), "must be 0 or more"))
        if self.mode not in MODES:
            found.append(Problem("mode", self.mode, f"must be one of {', '.join(MODES)}"))
        if self.warmup >= self.steps:
            found.append(Problem("warmup", self.warmup, f"must be below steps={self.steps}"))
        if not self.decode.points or min(min(point) for point in self.decode.points) < 0:
            found.append(Problem("decode", self.decode.points, "needs points N:S of sequences and seconds, 0 or more"))
        for name in ("tokens", "env"):
            one: Distribution = getattr(self, name)
            if not (one.mean >= 0 and one.std >= 0 and 0 <= one.straggler_share <= 1 and one.straggler_factor > 0):
                found.append(Problem(name, one, "needs a mean and deviation of 0 or more, and a share in [0, 1]"))
        return found


_NEAR = 1e-9
"""Tokens. Sequences whose ends are closer than this end at the same time."""


class Clock:
    """The simulated time in seconds, and the event queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def next(self) -> bool:
        """Run the next action. Return whether there was one."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


class _Engine:
    """``done``: tokens that a sequence would have if this engine had decoded it from the start."""

    __slots__ = ("busy", "done", "ends", "held", "since", "stamp", "tokens")

    def __init__(self) -> None:
        self.done = self.since = 0.0
        self.ends: list[tuple[float, int, Callable[[], None]]] = []
        self.stamp = 0
        self.busy = self.held = self.tokens = 0.0


class SimulatedEngines:
    """All engines, and a FIFO queue of requests. The least loaded engine with a free slot takes the next request."""

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
        """Queue a sequence of ``tokens`` tokens. ``done`` is called at its end."""
        self._waiting.append((tokens, done))

    def pause(self) -> None:
        """Pause all engines."""
        self._advance_all()
        self.paused = True

    def resume(self) -> None:
        """Resume all engines."""
        self._advance_all()
        self.paused = False
        self._changed.update(range(len(self._engines)))

    def settle(self) -> None:
        """Assign queued requests to engines and schedule the next events. Call this after every event."""
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
        """Return (busy seconds, slot seconds, tokens), summed over all engines since the last call."""
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
            heapq.heappop(self._loads)  # an outdated entry: the engine has a newer one
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
    """The result of a simulation. Shares and means exclude the warm-up steps."""

    mode: str
    step_seconds: float
    """Mean time of a step."""
    steps: tuple[float, ...]
    """Seconds of each step, including the warm-up."""
    trainer_busy: float
    """Share of the time in which the trainer trains."""
    engines_busy: float
    """Share of the time in which an engine decodes, mean over engines."""
    slots_used: float
    """Mean share of slots that decode."""
    gpus_busy: float
    """Mean of ``trainer_busy`` and ``engines_busy``, weighted by GPUs."""
    sync_share: float
    """Share of the time in which engines are paused for new weights."""
    staleness_mean: float
    staleness_max: int
    staleness: dict[int, int]
    """Staleness in steps → number of groups."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    started: int
    """Groups of the whole run: started, trained, finished but not trained, and still being sampled."""
    trained: int
    waiting: int
    running: int

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
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
        """Simulate all steps. Return (end of the warm-up, :meth:`SimulatedEngines.measure` since then)."""
        begin, measured = 0.0, self.plan.warmup == 0
        self.fill()
        self.engines.settle()
        while self.version < self.plan.steps:
            alive = self.clock.next()
            assert alive, "no event is left"
            self.engines.settle()
            if not measured and self.version >= self.plan.warmup:
                begin, measured = self.clock.now, True
                self.engines.measure()
        return begin, self.engines.measure()

    def fill(self) -> None:
        """Start as many groups as workers and staleness bound allow."""
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
        """Sample the remaining ``turns`` of a trajectory."""

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
        """Start a step if there is a batch that lets all other groups train before they are too stale."""
        if self.busy or len(self.finished) < self.plan.groups:
            return
        self.finished.sort(key=lambda group: (group.version, group.number))
        batch, left = self.finished[: self.plan.groups], self.finished[self.plan.groups :]
        if self.exceeds_staleness([*left, *self.running]):
            return
        self.busy, self.finished = True, left
        self.staleness.append([self.version - group.version for group in batch])
        self.fill()
        self.clock.at(self.clock.now + self.plan.train, self.trained)

    def exceeds_staleness(self, left: Sequence[_Group]) -> bool:
        """Return whether later steps cannot train all groups in time: whether, for some ``k``, more groups expire
        after ``k`` further steps than ``k`` steps can train."""
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
    """Simulate a run. The result is deterministic."""
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
