"""Rules of evaluation: its sets, the condition that ends a run, and the metric of the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.config.schema.evaluation import (
    BEST,
    SETS,
    STOP,
    EvalSetConfig,
    StopCondition,
    read_eval_sets,
    score_names,
)
from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


def evaluation_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield every problem of evaluation sets, ``trainer.stop_when`` and ``trainer.best_metric``."""
    sets, problems = read_eval_sets(cfg.data.eval_sets)
    yield from problems
    default = cfg.generator.eval_sampling_params
    for name, one in sets.items():
        if one.n > 1 and one.temperature is None and default is not None and default.temperature == 0:
            fix = f"the n={one.n} greedy responses to a prompt are all equal: set it above 0, or n=1"
            yield Problem(f"{SETS}.{name}.temperature", None, fix)
    trainer = cfg.trainer
    if trainer.stop_when is not None:
        try:
            condition = StopCondition.parse(trainer.stop_when)
        except ConfigError as error:
            yield from error.problems
        else:
            yield from _metric(cfg, STOP, trainer.stop_when, condition.metric, sets)
    if (best := trainer.best_metric) is not None:
        if not best.startswith("eval/"):
            yield Problem(BEST, best, "is no metric of an evaluation: use one such as eval/all/avg_score")
        else:
            yield from _metric(cfg, BEST, best, best, sets)


def _metric(
    cfg: SkyRLTrainConfig, key: str, value: str, metric: str, sets: dict[str, EvalSetConfig]
) -> Iterator[Problem]:
    """Check that evaluations run and measure the metric. Datasets of ``val_data`` are known once rows are read."""
    if not metric.startswith("eval/"):
        return
    if cfg.trainer.eval_interval <= 0:
        yield Problem(key, value, f"evaluations are off: set trainer.eval_interval, not {cfg.trainer.eval_interval}")
    _, name, *rest = metric.split("/")
    if name in sets and rest[-1:] and rest[-1] not in (known := score_names(sets[name])):
        yield Problem(key, value, f"eval/{name} has {', '.join(known)}: use one of them")
    if name not in sets and not cfg.data.val_data:
        have = f"{SETS} has {', '.join(sets)}" if sets else f"{SETS} and data.val_data are empty"
        yield Problem(key, value, f"no evaluation set has the name {name}: {have}")
