"""Rules of evaluation: its sets, the condition that ends a run, the metric of the best checkpoint, and which metrics a
run has."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.metric_table import describe, names_below, registered
from skyrl_megatron.config.roles import teacher_is_reward_model
from skyrl_megatron.config.schema.evaluation import (
    BEST,
    SETS,
    STOP,
    EvalSetConfig,
    StopCondition,
    data_set_names,
    read_eval_sets,
)
from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

VAL_DATA = "data.val_data"
type HeldOutGroups = Mapping[str, Collection[str]]
"""What the held-out data says: :data:`VAL_DATA` → its values of ``data_source``, and name of a set → those of its
column ``group_by``. A key that is missing is not known yet."""


def evaluation_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield every problem of evaluation sets, ``trainer.stop_when`` and ``trainer.best_metric``, as far as it shows
    without the data."""
    sets, problems = read_eval_sets(cfg.data.eval_sets)
    yield from problems
    default = cfg.generator.eval_sampling_params
    for name, one in sets.items():
        if one.n > 1 and one.temperature is None and default is not None and default.temperature == 0:
            fix = f"the n={one.n} greedy responses to a prompt are all equal: set it above 0, or n=1"
            yield Problem(f"{SETS}.{name}.temperature", None, fix)
    if cfg.trainer.stop_when is not None:
        try:
            StopCondition.parse(cfg.trainer.stop_when)
        except ConfigError as error:
            yield from error.problems
    if (best := cfg.trainer.best_metric) is not None and not best.startswith("eval/"):
        yield Problem(BEST, best, "is no metric of an evaluation: use one such as eval/all/avg_score")
    yield from metric_problems(cfg, {})


def metric_problems(cfg: SkyRLTrainConfig, groups: HeldOutGroups) -> Iterator[Problem]:
    """Yield a problem for each metric of ``trainer.stop_when`` and ``trainer.best_metric`` that the run will not have,
    and for a best metric of which no direction is known."""
    trainer = cfg.trainer
    asked: list[tuple[str, str, str]] = []
    if trainer.stop_when is not None and (condition := StopCondition.PATTERN.fullmatch(trainer.stop_when)) is not None:
        asked.append((STOP, trainer.stop_when, condition[1]))
    if trainer.best_metric is not None and trainer.best_metric.startswith("eval/"):
        asked.append((BEST, trainer.best_metric, trainer.best_metric))
    for key, value, metric in asked:
        if metric.startswith("eval/") and trainer.eval_interval <= 0:
            fix = f"evaluations are off: set trainer.eval_interval, not {trainer.eval_interval}"
            yield Problem(key, value, fix)
        elif registered(metric) is None and metric.startswith(("eval/", "reward/")):
            yield from _unknown(cfg, key, value, metric, groups)
        row = describe(metric)
        if key == BEST and row is not None and not row.better:
            fix = (
                "whether higher or lower values of it are better is not known: choose another, or declare it with"
                " skyrl_megatron.plugins.register_metric(…, direction=…)"
            )
            yield Problem(key, value, fix)


def _unknown(cfg: SkyRLTrainConfig, key: str, value: str, metric: str, groups: HeldOutGroups) -> Iterator[Problem]:
    scores = {f"eval/{name}/{score}" for name, of_name in held_out(cfg, groups).items() for score in of_name}
    metrics = sorted(scores) + [f"reward/{name}" for name in reward_names(cfg)]
    if metric in metrics or _may_be_of_data(cfg, metric, groups):
        return
    if not metrics:
        fix = f"the run has no rewards, and without {VAL_DATA} and {SETS} no evaluation: set one of them"
        yield Problem(key, value, fix)
        return
    near = difflib.get_close_matches(metric, metrics, n=1, cutoff=0.0)[0]
    others = ", ".join(name for name in metrics if name.rpartition("/")[0] == near.rpartition("/")[0])
    fix = (
        f"this run will have no metric {metric}: did you mean {near}? It has {others}; for a metric of your own call"
        " skyrl_megatron.plugins.register_metric"
    )
    yield Problem(key, value, fix)


def _may_be_of_data(cfg: SkyRLTrainConfig, metric: str, groups: HeldOutGroups) -> bool:
    """Return whether a score may be that of a part of the data that is not read yet."""
    name, _, score = metric.removeprefix("eval/").rpartition("/")
    if not metric.startswith("eval/") or not name or supervised(cfg) is not None:
        return False
    sets, first = read_eval_sets(cfg.data.eval_sets)[0], name.partition("/")[0]
    if first in sets:
        return name != first and first not in groups and score in set_scores(cfg, sets[first])
    adapters = cfg.trainer.policy.model.lora.adapters
    if not cfg.data.val_data or VAL_DATA in groups or (first == "adapter" and adapters):
        return False
    return name != "all" and score in val_scores(cfg)


def held_out(cfg: SkyRLTrainConfig, groups: HeldOutGroups) -> dict[str, list[str]]:
    """Return NAME → the scores ``eval/NAME/…`` that an evaluation of the run has, as far as they are known."""
    names: dict[str, list[str]] = {}
    if cfg.data.val_data:
        parts: Collection[str] = groups.get(VAL_DATA, ())
        if supervised(cfg) is not None:
            parts = data_set_names(cfg.data.val_data).values()
        adapters = [f"adapter/{adapter}" for adapter in cfg.trainer.policy.model.lora.adapters]
        names = dict.fromkeys(["all", *parts, *(adapters if supervised(cfg) is None else ())], val_scores(cfg))
    for name, one in read_eval_sets(cfg.data.eval_sets)[0].items() if supervised(cfg) is None else ():
        values = groups.get(name, ())
        inner = [f"{name}/{group_name(value)}" for value in values] if len(values) > 1 else []
        names |= dict.fromkeys([name, *inner], set_scores(cfg, one))
    return names


def group_name(value: str) -> str:
    """Return the name of a value of a set's column ``group_by`` in ``eval/SET/VALUE/…``."""
    return value.replace("/", "_")


def val_scores(cfg: SkyRLTrainConfig) -> list[str]:
    """Return the scores of each part of ``data.val_data``."""
    return _names(cfg, "eval/**/", {"pass_at_*": [cfg.generator.eval_n_samples_per_prompt]})


def set_scores(cfg: SkyRLTrainConfig, one: EvalSetConfig) -> list[str]:
    """Return the scores of a set."""
    return _names(cfg, "eval/**/", {"pass_at_*": one.ks, "majority_at_*": sorted(set(one.majority_at))})


def reward_names(cfg: SkyRLTrainConfig) -> list[str]:
    """Return the metrics ``reward/…`` of each step."""
    return _names(cfg, "reward/", {"avg_pass_at_*": [cfg.generator.n_samples_per_prompt]})


def _names(cfg: SkyRLTrainConfig, beginning: str, numbers: Mapping[str, Collection[int]]) -> list[str]:
    rows = supervised(cfg)
    conditions = {
        "pairs": getattr(rows, "paired", True),
        "several samples": cfg.generator.n_samples_per_prompt > 1,
        "a reward model as teacher": teacher_is_reward_model(cfg),
    }
    return names_below(beginning, "train" if rows is None else rows.SECTION, conditions, numbers)


def name_problems(cfg: SkyRLTrainConfig, groups: HeldOutGroups) -> Iterator[Problem]:
    """Yield a problem for each part of the held-out data whose scores would have the names of others."""
    sets, adapters = read_eval_sets(cfg.data.eval_sets)[0], cfg.trainer.policy.model.lora.adapters
    for source in groups.get(VAL_DATA, ()):
        first, _, rest = source.partition("/")
        rename = "rename it in the column data_source"
        if first in sets:
            fix = f"{VAL_DATA} has rows of a data set {source}, whose scores have the same names: rename the set"
            yield Problem(f"{SETS}.{first}", source, fix)
        elif source == "all":
            yield Problem(
                VAL_DATA, source, f"rows have this data_source, but eval/all/… are those of all rows: {rename}"
            )
        elif first == "adapter" and rest in adapters:
            fix = f"rows have this data_source, but eval/{source}/… are the scores of an adapter: {rename}"
            yield Problem(VAL_DATA, source, fix)
    for name in sets.keys() & groups.keys():
        for shown, count in Counter(map(group_name, groups[name])).items():
            if count > 1:
                values = " and ".join(sorted(value for value in groups[name] if group_name(value) == shown))
                fix = f"its values {values} would both be eval/{name}/{shown}/…: rename one of them in the data"
                yield Problem(f"{SETS}.{name}.group_by", sets[name].group_by, fix)
