"""``--check``: what a configuration comes to. Starts neither Ray nor CUDA."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware, read_size
from skyrl_megatron.entrypoints.command import run_command, run_hardware
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.preflight import load_config

_SIZES = {"--gpu": "gpu_bytes", "--host-memory": "host_bytes"}
OPTIONS = ("--check", *_SIZES)
"""Options of the check beside those of every command."""


def run(
    argv: Sequence[str],
    hardware: Hardware | None = None,
    cls: type[SkyRLTrainConfig] = SkyRLTrainConfig,
    *,
    training: bool = True,
    scripted: bool = False,
) -> int:
    """Print the report for ``argv`` (``--config``, ``key=value`` and :data:`OPTIONS`). Exit code 0, or 2 and every
    problem.

    ``hardware``: what the run would get; None is what ``--check=NODESxGPUS`` says, or what it would get now.
    ``training`` false: an evaluation; ``scripted``: a script brings an experiment of its own.
    """

    def work() -> int:
        asked, settings = _options(argv)
        machine = _with_memory(hardware or _hardware(asked), asked)
        cfg, not_checked = load_config(cls, settings, machine, training=training, scripted=scripted, ahead=True)
        from skyrl_megatron.preflight.check_report import report  # loads torch, which a wrong key need not wait for

        for line in report(cfg, machine):
            print(line)
        for each in ("", "# not checked here", *not_checked) if not_checked else ():
            print(each)
        return 0

    return run_command(work, beats=True)


def _options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (option → its text, the other arguments); the text may follow ``=`` or, but for ``--check``, a space."""
    asked: dict[str, str] = {}
    settings: list[str] = []
    rest = iter(argv)
    for arg in rest:
        name, given, text = arg.partition("=")
        if name not in OPTIONS:
            settings.append(arg)
        else:
            asked[name] = text if given or name == "--check" else next(rest, "")
    return asked, settings


def _with_memory(machine: Hardware, asked: Mapping[str, str]) -> Hardware:
    """Take the sizes of GPUs and nodes that the options give in place of those of the machine."""
    found: dict[str, Any] = {
        field: read_size(option, asked[option]) for option, field in _SIZES.items() if option in asked
    }
    return dataclasses.replace(machine, **found)


def asked_hardware(argv: Sequence[str]) -> Hardware:
    """Return the hardware that a command's arguments name, else what a run would get.

    Raises ConfigError, LaunchError.
    """
    return _hardware(_options(argv)[0])


def _hardware(asked: Mapping[str, str]) -> Hardware:
    """Read ``--check=2x8`` as 2 nodes of 8 GPUs; without a text it is what a run would get."""
    text = asked.get("--check", "")
    if not text:
        return run_hardware()
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise ConfigError([Problem("--check", text, "write NODESxGPUS, e.g. --check=2x8, or --check alone")])
    return Hardware(gpus_per_node=int(match[2]), nodes=int(match[1]), elsewhere=True)
