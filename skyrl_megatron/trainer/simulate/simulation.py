"""A run in simulated time: groups are sampled, batches are trained, weights travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from skyrl_megatron.trainer.simulate.engines import Clock, SimulatedEngines
from skyrl_megatron.trainer.simulate.plan import RunPlan


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
