"""What a command finds out within a second: wrong arguments, and a run that is finished."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyrl_megatron.checks import run_hardware
from skyrl_megatron.config.derive import is_address
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.validate import find_problems

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware


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
    from skyrl_megatron.trainer.stopping import remaining_work
    from skyrl_megatron.trainer.summary import summary_lines

    left = remaining_work(cfg)
    if left is None or not left.nothing:
        return False
    for line in (str(left), *summary_lines(cfg, left.step, left.step)):
        print(line, flush=True)
    return True
