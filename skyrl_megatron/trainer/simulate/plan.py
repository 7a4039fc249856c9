"""What a simulation is made of: machines, prompts, phases of a step, and how far sampling may run ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
