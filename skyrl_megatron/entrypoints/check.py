"""``--check``: report whether a configuration can run, and what it needs. Starts neither Ray nor CUDA."""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_megatron.checks import MEMORY_KEYS, NotChecked, check_config, run_hardware
from skyrl_megatron.command import run_command
from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl_megatron.config.hardware import GPU_TYPES, Hardware, read_size
from skyrl_megatron.config.parse import CHECK_OPTIONS, CHECK_SWITCHES
from skyrl_megatron.config.rules.placement_rules import gpus_requested, idle_gpus
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.plugins import DETAILS, REPORTERS

_SIZES = {"--gpu": "gpu_bytes", "--host-memory": "host_bytes"}


def run(
    argv: Sequence[str],
    hardware: Hardware | None = None,
    cls: type[SkyRLTrainConfig] = SkyRLTrainConfig,
    *,
    training: bool = True,
    scripted: bool = False,
) -> int:
    """Print the report for ``argv`` (``--config``, ``key=value`` and ``CHECK_OPTIONS``) and return the exit code: 0,
    or 2 if the configuration has problems, which go to stderr.

    ``hardware``: what the run would get; None: what ``--check=NODESxGPUS`` says, else the machine or cluster of this
    process. ``training``: False for an evaluation. ``scripted``: a script supplies its own experiment.
    """

    def work() -> int:
        options, settings = _options(argv)
        machine = _with_memory(hardware or _hardware(options), options)
        cfg, findings = check_config(cls, settings, machine, training=training, scripted=scripted, check_only=True)
        if any(problem.key not in MEMORY_KEYS for problem in findings.problems):
            raise ConfigError(findings.problems)
        if findings.problems:
            print(ConfigError(findings.problems), file=sys.stderr, flush=True)
        else:
            print("\n".join(_verdict(cfg, machine, findings.not_checked, training=training)), flush=True)
        print("\n".join(line for reporter in REPORTERS.all() for line in reporter(cfg, machine)))
        if "--show-config" in options:
            print("\n".join(line for reporter in DETAILS.all() for line in reporter(cfg, machine)))
            print("\n".join(_resolved(cfg)))
        return ConfigError.exit_code if findings.problems else 0

    gc.set_threshold(100_000, 50, 50)  # collections over all that is imported are a sixth of a check's time
    return run_command(work, beats=True)


def _options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (option → its value, the other arguments). The value follows ``=``; that of a size may follow a space."""
    options: dict[str, str] = {}
    settings: list[str] = []
    rest = iter(argv)
    for arg in rest:
        name, equals, text = arg.partition("=")
        if name not in CHECK_OPTIONS:
            settings.append(arg)
        else:
            options[name] = text if equals or name in CHECK_SWITCHES else next(rest, "")
    return options, settings


def _with_memory(machine: Hardware, options: Mapping[str, str]) -> Hardware:
    """Replace type and memory of the machine by those that the options give."""
    sizes: dict[str, Any] = {
        field: read_size(option, options[option]) for option, field in _SIZES.items() if option in options
    }
    name = options.get("--gpu", "").strip().upper()
    return dataclasses.replace(machine, **sizes, gpu=name if name in GPU_TYPES else machine.gpu)


def requested_hardware(argv: Sequence[str]) -> Hardware:
    """Return the hardware that ``--check=NODESxGPUS`` names, else what a run would get.

    Raises ConfigError if the text is wrong, LaunchError if the cluster does not answer.
    """
    return _hardware(_options(argv)[0])


def _hardware(options: Mapping[str, str]) -> Hardware:
    """Read ``--check=2x8`` as 2 nodes of 8 GPUs. Without a value, return what a run would get."""
    text = options.get("--check", "")
    if not text:
        return run_hardware()
    match = re.fullmatch(r"([1-9]\d*)x(\d+)", text)
    if match is None:
        raise ConfigError([Problem("--check", text, "write NODESxGPUS, e.g. --check=2x8, or --check alone")])
    return Hardware(gpus_per_node=int(match[2]), nodes=int(match[1]), elsewhere=True)


def _verdict(
    cfg: SkyRLTrainConfig, hardware: Hardware, not_checked: Sequence[NotChecked], *, training: bool = True
) -> Iterator[str]:
    """Yield the first lines of the report on a configuration without problems: that it can run, on which devices, what
    it resumes from, and what was not checked."""
    requested = gpus_requested(cfg)
    unit = "rank processes" if hardware.is_cpu else "GPUs"
    from skyrl_megatron.trainer.checkpoints import resume_lines  # loads torch, which is not needed for a wrong key

    yield f"it can run on this machine: {hardware}" if not hardware.elsewhere else f"it can run on: {hardware}"
    yield f"the run takes {sum(requested.values())} {unit}: " + ", ".join(f"{who} {n}" for who, n in requested.items())
    if idle := idle_gpus(cfg, hardware.node_gpus):
        yield idle
    if training:
        yield from resume_lines(cfg)
    yield ""
    if not_checked:
        yield "# not checked here"
        yield from map(str, not_checked)
        yield ""


def _resolved(cfg: SkyRLTrainConfig) -> Iterator[str]:
    """Yield the resolved configuration as YAML, which ``--show-config`` prints."""
    yield ""
    yield "# resolved configuration"
    yield get_config_as_yaml_str(cfg)
