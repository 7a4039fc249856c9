"""Evaluation sets (``data.eval_sets``), and the condition that ends a run (``trainer.stop_when``)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from skyrl_megatron.config.fields import Count, Fraction, NonNegative
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.metric_table import registered
from skyrl_megatron.errors import ConfigError, Problem

SETS, STOP, BEST = "data.eval_sets", "trainer.stop_when", "trainer.best_metric"
RESERVED = ("all", "adapter")
"""Names in ``eval/NAME/…`` that have another meaning."""
DATASET_KEY, UNKNOWN = "data_source", "unknown"
"""Column of a row that names its data set, and the name without it."""


@dataclass
class EvalSetConfig(BaseConfig):
    """One evaluation set: its prompts, how they are sampled, and what is measured."""

    data: list[str] = field(default_factory=list)
    """Prompts, in the forms of ``data.val_data``."""
    n: Count = 1
    """Responses per prompt."""
    temperature: NonNegative | None = None
    """Sampling temperature. None: that of ``generator.eval_sampling_params``."""
    top_p: Fraction | None = None
    """Nucleus of the sampling distribution. None: that of ``generator.eval_sampling_params``."""
    pass_at: list[int] = field(default_factory=list)
    """Values of k of pass@k. []: powers of two up to ``n``, and ``n``."""
    majority_at: list[int] = field(default_factory=list)
    """Values of k of majority@k."""
    group_by: str = "data_source"
    """Column whose values are scored separately as well, if there are several."""

    def problems(self, key: str) -> list[Problem]:
        """Return the problems of the set at ``key``."""
        problems = [] if self.data else [Problem(f"{key}.data", [], "set at least one data set")]
        for name in ("pass_at", "majority_at"):
            if wrong := [k for k in getattr(self, name) if not 1 <= k <= self.n]:
                fix = f"k={wrong[0]} must be between 1 and n={self.n}, the responses per prompt: change it, or set n"
                problems.append(Problem(f"{key}.{name}", getattr(self, name), fix))
        if self.top_p == 0:
            problems.append(Problem(f"{key}.top_p", 0.0, "must be above 0"))
        if self.temperature == 0 and self.n > 1:
            fix = f"the n={self.n} greedy responses to a prompt are all equal: set it above 0, or n=1"
            problems.append(Problem(f"{key}.temperature", 0.0, fix))
        return problems

    @property
    def ks(self) -> list[int]:
        """The values of k of pass@k, ascending."""
        return sorted(set(self.pass_at)) or sorted({self.n, *(2**i for i in range(self.n.bit_length()))})


_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def read_eval_sets(given: Mapping[str, Any]) -> tuple[dict[str, EvalSetConfig], list[Problem]]:
    """Return name → set, and every problem of ``data.eval_sets``."""
    sets: dict[str, EvalSetConfig] = {}
    problems: list[Problem] = []
    for name, options in given.items():
        key = f"{SETS}.{name}"
        if not _NAME.fullmatch(str(name)) or name in RESERVED:
            fix = f"names the metrics eval/NAME/…: use letters, digits, '-', '_' and '.', not {' or '.join(RESERVED)}"
            problems.append(Problem(SETS, name, fix))
            continue
        try:
            sets[name] = EvalSetConfig.from_dict_config(dict(options or {}))
        except ConfigError as error:
            problems += [Problem(f"{key}.{problem.key}", problem.value, problem.fix) for problem in error.problems]
        except (TypeError, ValueError):
            problems.append(Problem(key, options, "must be a mapping, such as {data: [FILE], n: 4}"))
        else:
            problems += sets[name].problems(key)
    return sets, problems


def eval_sets(given: Mapping[str, Any]) -> dict[str, EvalSetConfig]:
    """Return name → set. Raises ConfigError with every problem."""
    sets, problems = read_eval_sets(given)
    if problems:
        raise ConfigError(problems)
    return sets


@dataclass(frozen=True, slots=True)
class StopCondition:
    """A comparison of a metric with a number."""

    metric: str
    comparison: str
    number: float

    PATTERN: ClassVar[re.Pattern[str]] = re.compile(r"\s*(\S+?)\s*(>=|<=|>|<)\s*(\S+)\s*")
    COMPARE: ClassVar[dict[str, Callable[[float, float], bool]]] = {
        ">=": operator.ge,
        "<=": operator.le,
        ">": operator.gt,
        "<": operator.lt,
    }

    @classmethod
    def parse(cls, text: str) -> StopCondition:
        """Return the condition. Raises ConfigError with the key, the text and the fix."""
        match = cls.PATTERN.fullmatch(text)
        fix = "write METRIC >= NUMBER (or >, <=, <), such as eval/all/avg_score >= 0.8"
        if match is None:
            raise ConfigError([Problem(STOP, text, fix)])
        metric, comparison, right = match.groups()
        try:
            number = float(right)
        except ValueError as error:
            raise ConfigError([Problem(STOP, text, f"{right!r} is not a number: {fix}")]) from error
        if number != number:
            raise ConfigError([Problem(STOP, text, f"nothing compares with {right}: {fix}")])
        if not metric.startswith(("eval/", "reward/")):
            fix = f"{metric} is no metric of evaluation or rewards: use one that begins with eval/ or reward/"
            if registered(metric) is None:
                raise ConfigError([Problem(STOP, text, fix)])
        return cls(metric, comparison, number)

    def holds(self, value: float) -> bool:
        """Return whether the condition holds for a value of the metric; never for NaN."""
        return self.COMPARE[self.comparison](value, self.number)


def data_set_names(paths: Sequence[str]) -> dict[str, str]:
    """Return path → name in ``eval/NAME/…`` of a data set of supervised training: the last parts of its path, as few
    as tell it from the others and from :data:`RESERVED`."""
    parts = {path: path.rstrip("/").split("/") for path in paths}
    names: dict[str, str] = {}
    for path, folders in parts.items():
        for count in range(1, len(folders) + 1):
            names[path] = "/".join(folders[-count:])
            alike = [other for other in parts if other != path and parts[other][-count:] == folders[-count:]]
            if not alike and names[path] not in RESERVED:
                break
    return names
