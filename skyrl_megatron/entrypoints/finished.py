"""What a command's arguments come to, before anything is loaded or started: a run that is finished and asked for
nothing new says so."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyrl_megatron.config.parse.load import parse
from skyrl_megatron.config.paths import is_address
from skyrl_megatron.config.validate import find_problems
from skyrl_megatron.entrypoints.run_hardware import run_hardware

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware


class Ahead(enum.Enum):
    """What a command's arguments come to, before its model and data are looked at."""

    FINISHED = enum.auto()
    """A finished run that is asked for nothing new, which has been said."""
    REFUSED = enum.auto()
    """``load_config`` refuses them."""
    RUN = enum.auto()
    """As far as is known by then."""


def look_ahead(cls: type[SkyRLTrainConfig], argv: Sequence[str], hardware: Hardware | None = None) -> Ahead:
    """Return what the arguments come to. Takes a second: neither files nor libraries are loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cfg, problems = parse(cls, argv)
        if problems or find_problems(cfg, hardware or run_hardware()):
            return Ahead.REFUSED
    return Ahead.FINISHED if nothing_left(cfg) else Ahead.RUN


def nothing_left(cfg: SkyRLTrainConfig) -> bool:
    """Say so, and where the run's files are, when there is nothing left to do. ``cfg`` is resolved."""
    folder = cfg.trainer.ckpt_path
    if cfg.trainer.resume_mode in (None, "none"):
        return False
    if not is_address(folder) and not os.path.isdir(folder) and cfg.trainer.resume_mode != "from_path":
        return False
    from skyrl_megatron.trainer.limits import leftover  # torch, which a first run need not await
    from skyrl_megatron.trainer.report import last_lines

    left = leftover(cfg)
    if left is None or not left.nothing:
        return False
    for line in (str(left), *last_lines(cfg, left.step, left.step)):
        print(line, flush=True)
    return True
