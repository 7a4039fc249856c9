"""``--check``: what a configuration comes to, before anything is taken: neither Ray nor CUDA is started."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.validate import from_command_line
from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import ConfigError, Problem


def run(
    argv: Sequence[str],
    hardware: Hardware | None = None,
    cls: type[SkyRLTrainConfig] = SkyRLTrainConfig,
    *,
    training: bool = True,
) -> int:
    """Print the report for ``argv`` (``--config``, ``key=value``, ``--check``). Exit code 0, or 2 and every problem.

    ``hardware``: what the run would get; None is what ``--check=NODESxGPUS`` says, or this machine. ``training``
    false: an evaluation.
    """

    def work() -> int:
        asked = [arg.partition("=")[2] for arg in argv if arg.partition("=")[0] == "--check"]
        settings = [arg for arg in argv if arg.partition("=")[0] != "--check"]
        machine = hardware or _hardware(asked[-1] if asked else "")
        cfg = from_command_line(cls, settings, machine, training=training)
        from skyrl_megatron.entrypoints.check_report import report  # loads torch, which a wrong key need not wait for

        for line in report(cfg, machine):
            print(line)
        return 0

    return run_command(work)


def _hardware(text: str) -> Hardware:
    """Read ``2x8`` as 2 nodes of 8 GPUs; empty is this machine."""
    if not text:
        return local_hardware()
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise ConfigError([Problem("--check", text, "write NODESxGPUS, e.g. --check=2x8, or --check alone")])
    return Hardware(gpus_per_node=int(match[2]), nodes=int(match[1]))
