"""Preflight checks: everything that a run is refused for, found before it starts.

A check is a function of a :class:`PlannedRun` that yields Problems, and NotChecked for what only the run itself can
tell. It starts nothing, leaves nothing behind, and reads no more than it must. The rules of the configuration alone,
which read no files, are those of :mod:`skyrl_megatron.config.validate`.
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
from skyrl_megatron.preflight.data_checks import data, vocabularies
from skyrl_megatron.preflight.machine_checks import attention, folders, machine, memory, ports, replay
from skyrl_megatron.preflight.model_checks import engine_weights, model_files, pin_hub_names
from skyrl_megatron.preflight.option_checks import NotChecked, PlannedRun, features, foreign_options, packages
from skyrl_megatron.progress import heartbeat, under_way

__all__ = ["CHECKS", "Findings", "NotChecked", "PlannedRun", "load_config", "look", "validate_cfg"]


CHECKS: tuple[Callable[[PlannedRun], Iterator[Problem | NotChecked]], ...] = (
    features,
    foreign_options,
    packages,
    model_files,
    vocabularies,
    engine_weights,
    data,
    folders,
    replay,
    ports,
    machine,
    attention,
    memory,
)
"""All of them, in the order in which their problems are listed."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Outcome of all checks."""

    problems: list[Problem]
    not_checked: list[NotChecked]


def look(run: PlannedRun) -> Findings:
    """Resolve the configuration of ``run`` in place and go through the rules and all checks."""
    with heartbeat(_say):
        try:
            load_plugins(run.cfg.trainer.plugins)
        except ConfigError as error:  # what they register is unknown, and would be reported too
            return Findings(list(error.problems), [])
        found: list[Problem | NotChecked] = [*pin_hub_names(run)]
        found += find_problems(run.cfg, run.hardware)
        for check in CHECKS:
            with under_way(f"check {check.__name__}"):
                found += check(run)
    problems = {str(each): each for each in found if isinstance(each, Problem)}
    return Findings(list(problems.values()), [each for each in found if isinstance(each, NotChecked)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def load_config[C: SkyRLTrainConfig](
    cls: type[C],
    argv: Sequence[str],
    hardware: Hardware | None = None,
    *,
    training: bool = True,
    scripted: bool = False,
    ahead: bool = False,
) -> tuple[C, list[NotChecked]]:
    """Return the resolved configuration of a command's arguments, and what could not be checked.

    ``training``, ``scripted`` and ``ahead`` as in :class:`PlannedRun`. Where the run is to start now, arguments that
    cannot be read are refused at once, before libraries are loaded and files are looked at.

    Raises ConfigError with all problems at once: those of reading, and those of the configuration that results with
    unreadable values left at their defaults.
    """
    cfg, problems = parse(cls, argv)
    unread = {problem.key for problem in problems}
    run = PlannedRun(cfg, hardware or run_hardware(), training, scripted, ahead)
    found = look(run) if ahead or not problems else Findings(find_problems(cfg, run.hardware), [])
    problems += [problem for problem in found.problems if problem.key not in unread]
    if problems:
        raise ConfigError(problems)
    return cfg, found.not_checked


@accepts_dict_config
def validate_cfg(cfg: SkyRLTrainConfig, hardware: Hardware | None = None) -> None:
    """Check everything that can be known before a run is started, for scripts that build a run of their own.

    Imports plugins, fills in what depends on other fields and on the machine (``cfg`` changes in place, also as an
    omegaconf ``DictConfig``), and warns of settings without effect. ``hardware``: what the run will get; None asks for
    it (:func:`run_hardware`). Raises ConfigError with every problem, each naming key, value and fix.
    """
    found = look(PlannedRun(cfg, hardware or run_hardware(), scripted=True))
    if found.problems:
        raise ConfigError(found.problems)
