"""Checks before a run: what they are given, what they return, and how they are applied.

A check is a function of a :class:`PlannedRun`. It yields a Problem for each fault, and a NotChecked for each fact that
only the started run can show. It starts nothing and leaves no files. The rules that need the configuration alone
(:mod:`skyrl_megatron.config.validate`) always apply. Checks that read models, data or the machine are registered with
``plugins.register_check``; ``skyrl_megatron_observe.preflight`` has most of them. Without any, a run starts all the
same, and finds its faults one at a time. :func:`quick_check` is what a command finds out within a second.
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron import hub
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import derive, is_address
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.hf_model import hub_models
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.resolve import accepts_dict_config
from skyrl_megatron.config.roles import active_roles
from skyrl_megatron.config.rules.placement_rules import missing_gpus
from skyrl_megatron.config.schema.evaluation import SETS, read_eval_sets
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.errors import ConfigError, LaunchError, Problem
from skyrl_megatron.plugins import CHECKS, load_plugins
from skyrl_megatron.progress import current_task, heartbeat

GPU_MEMORY, HOST_MEMORY = "GPU memory", "host memory"
MEMORY_KEYS = (GPU_MEMORY, HOST_MEMORY)
"""Keys of the Problems of phases that do not fit into memory. ``--check`` prints its report in spite of them, because
the report shows what to change."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that has not started. Its configuration may have problems."""

    cfg: SkyRLTrainConfig
    hardware: Hardware
    """The hardware that the run will get."""
    training: bool = True
    """False for an evaluation, which reads no training data and trains nothing."""
    scripted: bool = False
    """True if a user's script starts the run. The script may supply its own data sets and tokenizer."""
    check_only: bool = False
    """True for ``--check``: weights and tokenizer of a model may still be missing."""

    def awaits_files(self, folder: Path) -> bool:
        """Return whether the weights of a model are allowed to be missing from its folder, and are."""
        return self.check_only and not any(folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class NotChecked:
    """Something that can be checked only when the run has started."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class Findings:
    """Outcome of all checks."""

    problems: list[Problem]
    not_checked: list[NotChecked]


def run_checks(run: PlannedRun) -> Findings:
    """Resolve the configuration of ``run`` in place, and apply the rules and all registered checks to it."""
    with heartbeat(_say):
        try:
            load_plugins(run.cfg.trainer.plugins)
        except ConfigError as error:  # without the plugins, the names that they register would be reported too
            return Findings(list(error.problems), [])
        derive(run.cfg)
        if missing := list(missing_gpus(run.cfg, run.hardware)):
            return Findings(missing, [])
        outcomes: list[Problem | NotChecked] = [*_pin_hub_names(run)]
        outcomes += find_problems(run.cfg, run.hardware, training=run.training)
        for check in CHECKS.all():
            with current_task(f"check {check.__name__}"):
                outcomes += check(run)
    # Two checks may report the same fault of a model that two roles share.
    problems = {str(outcome): outcome for outcome in outcomes if isinstance(outcome, Problem)}
    return Findings(list(problems.values()), [outcome for outcome in outcomes if isinstance(outcome, NotChecked)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pin_hub_names(run: PlannedRun) -> list[Problem]:
    """Fill in ``trainer.hub_commits``, and return a problem for each name that is unknown or cannot be looked up.

    ``run.cfg`` is derived. Called before the rules, which read the models' ``config.json`` from the cache.
    """
    cfg = run.cfg
    lists = {"data.train_data": cfg.data.train_data if run.training else [], "data.val_data": cfg.data.val_data}
    lists |= {f"{SETS}.{name}.data": one.data for name, one in read_eval_sets(cfg.data.eval_sets)[0].items()}
    references = [*hub_models(cfg, active_roles(cfg))]
    references += [reference for key, names in lists.items() for reference in hub.data_sets(key, names)]
    if not references:
        return []
    from skyrl_megatron.trainer.checkpoints import recorded_hub_commits  # loads torch, and few runs need it

    return hub.pin(cfg.trainer.hub_commits, references, recorded_hub_commits(cfg), _say)


def check_config[C: SkyRLTrainConfig](
    cls: type[C],
    argv: Sequence[str],
    hardware: Hardware | None = None,
    *,
    training: bool = True,
    scripted: bool = False,
    check_only: bool = False,
) -> tuple[C, Findings]:
    """Return the resolved configuration of a command's arguments, and the outcome: the problems of reading the
    arguments, and those of the configuration. A value that cannot be read is replaced by its default.

    ``training``, ``scripted`` and ``check_only``: see :class:`PlannedRun`. If a run is to start now and its arguments
    cannot be read, the checks that load libraries and open files are skipped.
    """
    cfg, problems = parse(cls, argv)
    unread = {problem.key for problem in problems}
    run = PlannedRun(cfg, hardware or run_hardware(), training, scripted, check_only)
    if check_only or not problems:
        findings = run_checks(run)
    else:
        findings = Findings(find_problems(cfg, run.hardware, training=training), [])
    # The default that stands in for an unreadable value would be judged as if the user had chosen it.
    problems += [problem for problem in findings.problems if problem.key not in unread]
    return cfg, Findings(problems, findings.not_checked)


class QuickCheck(enum.Enum):
    """Result of :func:`quick_check`."""

    FINISHED = enum.auto()
    """The run is finished and there is nothing left to do. This has been printed."""
    REFUSED = enum.auto()
    """The arguments have problems, which ``load_config`` will report."""
    RUN = enum.auto()
    """No problem was found. Model and data have not been checked."""


def quick_check(cls: type[SkyRLTrainConfig], argv: Sequence[str], hardware: Hardware | None = None) -> QuickCheck:
    """Check a command's arguments within a second, without loading large libraries, models or data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg, problems = parse(cls, argv)
        if problems or find_problems(cfg, hardware or run_hardware()):
            return QuickCheck.REFUSED
    return QuickCheck.FINISHED if report_if_finished(cfg) else QuickCheck.RUN


def report_if_finished(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the run is finished; if so, print that and where its files are. ``cfg`` is resolved."""
    folder = cfg.trainer.ckpt_path
    if cfg.trainer.resume_mode in (None, "none"):
        return False
    if not is_address(folder) and not os.path.isdir(folder) and cfg.trainer.resume_mode != "from_path":
        return False
    from skyrl_megatron.trainer.stopping import remaining_work, summary_lines  # loads torch

    left = remaining_work(cfg)
    if left is None or not left.nothing:
        return False
    for line in (str(left), *summary_lines(cfg, left.step, left.step)):
        print(line, flush=True)
    return True


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
    findings = run_checks(PlannedRun(cfg, hardware or run_hardware(), scripted=True))
    if findings.problems:
        raise ConfigError(findings.problems)


ANSWER_S = 90.0
"""Timeout for asking a cluster for its nodes, in seconds. It includes the import of Ray and the connection."""
SIZES = ("gpu_bytes", "host_bytes", "lockable_bytes")
"""Sizes that each node reports in addition to its number of GPUs (fields of Hardware)."""


def run_hardware() -> Hardware:
    """Return the nodes of the cluster that ``RAY_ADDRESS`` names, else this machine as one node.

    The process that starts a run may be on a node without GPUs, or outside the cluster, so the cluster is asked.
    Raises LaunchError if it does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    return cluster_hardware(address) if address else local_hardware()


def cluster_hardware(address: str) -> Hardware:
    """Return the hardware of the Ray cluster at ``address``, which a short-lived process asks for. Raises LaunchError.

    If nodes differ, ``gpus_per_node`` is the maximum, memory and lockable memory are the minimum over nodes with GPUs,
    and the type of GPU is None. A size is None if a node does not report it.
    """
    command = [sys.executable, "-m", "skyrl_megatron.workers.ray_setup", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"RAY_ADDRESS={address}: the cluster did not report its nodes within {ANSWER_S:g} s; run ray status"
        ) from None
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        errors = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise LaunchError(errors[-1] if asked.returncode == 1 else f"RAY_ADDRESS={address}: {errors[-1]}")
    nodes: list[dict[str, Any]] = json.loads(lines[-1])
    with_gpus = [node for node in nodes if node["gpus"]]
    if not with_gpus:
        return Hardware(0, len(nodes), elsewhere=True)
    counts = sorted((node["gpus"] for node in with_gpus), reverse=True)
    kinds = {node.get("gpu") for node in with_gpus}
    gpu, host, lockable = ([int(node[name]) for node in with_gpus if node.get(name) is not None] for name in SIZES)
    return Hardware(
        counts[0],
        len(with_gpus),
        min(gpu) if len(gpu) == len(with_gpus) else None,
        min(host) if len(host) == len(with_gpus) else None,
        min(lockable, default=None),
        kinds.pop() if len(kinds) == 1 else None,
        elsewhere=True,
        uneven=tuple(counts) if len(set(counts)) > 1 else (),
    )
