"""Gates: which finished groups a run trains on (``trainer.algorithm.dynamic_sampling.gates``, name → options).

A gate sees all rows of a prompt. A group that one refuses is counted by the name of the gate, and replaced by the
group of another prompt. A plugin registers a class with ``skyrl_megatron.plugins.register_gate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from skyrl_megatron.config.fields import Count, NonNegativeInt
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.errors import ConfigError, DataError, Problem, SkyRLMegatronError, with_origin
from skyrl_megatron.plugins import GATES
from skyrl_megatron.rollout.interface import GeneratorOutput, sampled_trajectories

KEY = "trainer.algorithm.dynamic_sampling.gates"


class Gate:
    """A gate with its ``options``."""

    Options: ClassVar[type[BaseConfig]]
    """The dataclass of the options."""
    observed: ClassVar[bool] = False
    """Whether an adaptive sampler observes the rewards of the groups that it refuses."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def admits(self, group: GeneratorOutput, version: int) -> bool:
        """Return whether to train on the rows of a prompt. ``version``: of the weights that are trained next."""
        raise NotImplementedError


@dataclass
class RewardOptions(BaseConfig):
    """Options of ``reward``. None: no bound."""

    low: float | None = None
    """Lowest mean reward of a group."""
    high: float | None = None
    """Highest mean reward of a group."""


class RewardGate(Gate):
    """Admits groups whose mean reward is within bounds (included). Trajectories whose environment failed do not count;
    a group without others is refused. What it refuses is observed: its rewards say how hard the prompt is."""

    Options = RewardOptions
    observed = True

    def __init__(self, options: RewardOptions) -> None:
        super().__init__(options)
        _require_range("reward", options.low, options.high)

    def admits(self, group: GeneratorOutput, version: int) -> bool:
        """See :class:`Gate`."""
        trajectories = sampled_trajectories(group, [""] * len(group["rewards"]))
        rewards = [trajectory.reward for trajectory in trajectories if not trajectory.failed]
        return bool(rewards) and _within(float(np.mean(rewards)), self.options.low, self.options.high)


@dataclass
class LengthOptions(BaseConfig):
    """Options of ``length``. None: no bound."""

    low: NonNegativeInt | None = None
    """Least number of response tokens of every row."""
    high: Count | None = None
    """Largest number of response tokens of every row."""


class LengthGate(Gate):
    """Admits groups all of whose responses have a length within bounds, in tokens (included)."""

    Options = LengthOptions

    def __init__(self, options: LengthOptions) -> None:
        super().__init__(options)
        _require_range("length", options.low, options.high)

    def admits(self, group: GeneratorOutput, version: int) -> bool:
        """See :class:`Gate`."""
        return all(_within(len(row), self.options.low, self.options.high) for row in group["response_ids"])


@dataclass
class StalenessOptions(BaseConfig):
    """Options of ``staleness``."""

    high: NonNegativeInt = 0
    """Largest staleness of a trained token, in steps."""


class StalenessGate(Gate):
    """Admits groups whose oldest trained token is at most ``high`` versions old when they are trained. The groups of
    an asynchronous run grow older while they wait: its stream refuses them when it fills a batch."""

    Options = StalenessOptions
    observed = True

    def admits(self, group: GeneratorOutput, version: int) -> bool:
        """See :class:`Gate`. Tokens whose version is unknown are new."""
        return all(
            version - int(name) <= self.options.high
            for spans, mask in zip(group.get("rollout_versions") or [], group["loss_masks"], strict=False)
            for name, first, end in spans
            if name.isdecimal() and any(mask[first:end])
        )


@dataclass
class NonFiniteOptions(BaseConfig):
    """``nonfinite`` has no options."""


class NonFiniteGate(Gate):
    """Refuses groups with a log-prob or reward that is NaN or infinite, where ``algorithm.nonfinite=skip`` masks
    single samples. Without ``skip`` such a reward of an environment ends the run before the gate sees it."""

    Options = NonFiniteOptions

    def admits(self, group: GeneratorOutput, version: int) -> bool:
        """See :class:`Gate`."""
        values = [*group["rewards"], *(group["rollout_logprobs"] or [])]
        return all(bool(np.isfinite(np.asarray(value, np.float64)).all()) for value in values)


BUILT_IN: dict[str, type[Gate]] = {
    "reward": RewardGate,
    "length": LengthGate,
    "staleness": StalenessGate,
    "nonfinite": NonFiniteGate,
}


class Gates:
    """The gates of a run, in the order of the configuration. Raises ConfigError with every problem of ``given``, name
    → options."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.gates: dict[str, Gate] = {}
        problems: list[Problem] = []
        for name, options in given.items():
            kind: Any = BUILT_IN.get(name) or GATES.find(name)
            if kind is None:
                problems += [Problem(f"{KEY}.{name}", options, problem.fix) for problem in GATES.problems(name)]
                continue
            try:
                self.gates[name] = kind(kind.Options.from_dict_config(dict(options or {})))
            except ConfigError as error:
                problems += [
                    Problem(f"{KEY}.{name}.{problem.key}", problem.value, problem.fix) for problem in error.problems
                ]
            except (TypeError, ValueError):
                problems.append(Problem(f"{KEY}.{name}", options, "must be a mapping of options, such as {}"))
        if problems:
            raise ConfigError(problems)

    @property
    def oldest(self) -> int | None:
        """Largest staleness that the gate ``staleness`` admits, None without it."""
        gate = self.gates.get("staleness")
        return gate.options.high if isinstance(gate, StalenessGate) else None

    def refusal(self, group: GeneratorOutput, version: int, *, leave_out: Iterable[str] = ()) -> str | None:
        """Return the name of the first gate that refuses the rows of a prompt, None if all admit them.

        ``leave_out``: gates that are not asked. Raises DataError for an error of a plugin."""
        for name, gate in self.gates.items():
            try:
                if name not in leave_out and not gate.admits(group, version):
                    return name
            except SkyRLMegatronError:
                raise
            except Exception as error:
                raise DataError(f"{KEY}.{name} failed ({with_origin(error)})") from error
        return None

    def observed(self, name: str) -> bool:
        """Return whether the groups that a gate refuses are observed."""
        return self.gates[name].observed


def _within(value: float, low: float | None, high: float | None) -> bool:
    """Return whether a value is within bounds; NaN never is."""
    return value == value and (low is None or value >= low) and (high is None or value <= high)


def _require_range(name: str, low: float | None, high: float | None) -> None:
    """Raise ConfigError unless one bound is given, and they are in order."""
    if low is None and high is None:
        raise ConfigError([Problem("low", None, "set low, high or both, or leave out the gate")])
    if low is not None and high is not None and low > high:
        raise ConfigError([Problem("low", low, f"must be at most {KEY}.{name}.high={high}")])
