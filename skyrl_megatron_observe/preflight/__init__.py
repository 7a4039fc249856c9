"""Preflight checks: they find everything that makes a run impossible before it starts.

A check is a function of a :class:`PlannedRun`. It yields a Problem for each fault, and a NotChecked for each fact that
only the started run can show. It starts nothing and leaves no files. The rules that need the configuration alone are
in :mod:`skyrl_megatron.config.validate`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.resolve import accepts_dict_config
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.entrypoints.command import run_hardware
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.plugins import load_plugins
from skyrl_megatron.progress import current_task, heartbeat
from skyrl_megatron_observe.preflight.data_checks import data, vocabularies
from skyrl_megatron_observe.preflight.foreign_values import foreign_values
from skyrl_megatron_observe.preflight.machine_checks import attention, folders, machine, memory, ports, replay, resume
from skyrl_megatron_observe.preflight.model_checks import engine_weights, model_files, pin_hub_names
from skyrl_megatron_observe.preflight.option_checks import NotChecked, PlannedRun, features, foreign_options, packages

__all__ = [
    "CHECKS",
    "Findings",
    "NotChecked",
    "PlannedRun",
    "check_config",
    "load_config",
    "run_checks",
    "validate_cfg",
]


CHECKS: tuple[Callable[[PlannedRun], Iterator[Problem | NotChecked]], ...] = (
    features,
    foreign_options,
    foreign_values,
    packages,
    model_files,
    vocabularies,
    engine_weights,
    data,
    folders,
    resume,
    replay,
    ports,
    machine,
    attention,
    memory,
)
"""All checks, in the order in which their problems are listed."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Outcome of all checks."""

    problems: list[Problem]
    not_checked: list[NotChecked]


def run_checks(run: PlannedRun) -> Findings:
    """Resolve the configuration of ``run`` in place, and apply the rules and all checks to it."""
    with heartbeat(_say):
        try:
            load_plugins(run.cfg.trainer.plugins)
        except ConfigError as error:  # without the plugins, the names that they register would be reported too
            return Findings(list(error.problems), [])
        found: list[Problem | NotChecked] = [*pin_hub_names(run)]
        found += find_problems(run.cfg, run.hardware, training=run.training)
        for check in CHECKS:
            with current_task(f"check {check.__name__}"):
                found += check(run)
    problems = {str(each): each for each in found if isinstance(each, Problem)}
    return Findings(list(problems.values()), [each for each in found if isinstance(each, NotChecked)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_config[C: SkyRLTrainConfig](
    cls: type[C],
    argv: Sequence[str],
    hardware: Hardware | None = None,
    *,
    training: bool = True,
    scripted: bool = False,
    check_only: bool = False,
) -> tuple[C, Findings]:
    """Return the resolved configuration of a command's arguments, and everything found: the problems of reading the
    arguments, and those of the configuration. A value that cannot be read is replaced by its default.

    ``training``, ``scripted`` and ``check_only``: see :class:`PlannedRun`. If a run is to start now and its arguments
    cannot be read, the checks that load libraries and open files are skipped.
    """
    cfg, problems = parse(cls, argv)
    unread = {problem.key for problem in problems}
    run = PlannedRun(cfg, hardware or run_hardware(), training, scripted, check_only)
    if check_only or not problems:
        found = run_checks(run)
    else:
        found = Findings(find_problems(cfg, run.hardware, training=training), [])
    problems += [problem for problem in found.problems if problem.key not in unread]
    return cfg, Findings(problems, found.not_checked)


def load_config[C: SkyRLTrainConfig](
    cls: type[C],
    argv: Sequence[str],
    hardware: Hardware | None = None,
    *,
    training: bool = True,
    scripted: bool = False,
) -> tuple[C, list[NotChecked]]:
    """Return the resolved configuration of a run that is to start, and what could not be checked.

    The arguments are those of :func:`check_config`. Raises ConfigError with all problems at once.
    """
    cfg, findings = check_config(cls, argv, hardware, training=training, scripted=scripted)
    if findings.problems:
        raise ConfigError(findings.problems)
    return cfg, findings.not_checked


@accepts_dict_config
def validate_cfg(cfg: SkyRLTrainConfig, hardware: Hardware | None = None) -> None:
    """Check a configuration before its run starts. For scripts that build the run themselves.

    Imports plugins, fills in the fields that depend on others and on the machine, and warns of settings without
    effect. Changes ``cfg`` in place, also an omegaconf ``DictConfig``. ``hardware``: what the run will get; None: the
    result of :func:`run_hardware`. Raises ConfigError with every problem; each names key, value and fix.
    """
    found = run_checks(PlannedRun(cfg, hardware or run_hardware(), scripted=True))
    if found.problems:
        raise ConfigError(found.problems)
