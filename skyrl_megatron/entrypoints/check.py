"""``--check``: what a configuration comes to, before anything is taken: neither Ray nor CUDA is started."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.validate import from_command_line
from skyrl_megatron.entrypoints.command import run_command


def run(
    argv: Sequence[str],
    hardware: Hardware | None = None,
    cls: type[SkyRLTrainConfig] = SkyRLTrainConfig,
    *,
    training: bool = True,
) -> int:
    """Print the report for ``argv`` (``--config`` and ``key=value``). Exit code 0, or 2 after naming every problem.

    ``hardware``: what the run would get; None is this machine. ``training`` false: an evaluation.
    """

    def work() -> int:
        machine = hardware or local_hardware()
        cfg = from_command_line(cls, argv, machine, training=training)
        from skyrl_megatron.entrypoints.check_report import report  # loads torch, which a wrong key need not wait for

        for line in report(cfg, machine):
            print(line)
        return 0

    return run_command(work)
