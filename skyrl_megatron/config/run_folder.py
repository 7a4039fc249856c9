"""Where a run logs to: its folder, with the resolved configuration in it, and its trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config.schema.root import get_config_as_yaml_str

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig


def trackers(cfg: SkyRLTrainConfig) -> list[str]:
    """Return the trackers of ``trainer.logger``, each once; wandb with a key, or a mode without one."""
    logger = cfg.trainer.logger
    named = dict.fromkeys([logger] if isinstance(logger, str) else logger)
    if not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ:
        named.pop("wandb", None)
    return [name for name in named if name not in ("console", "tensorboard")]


def run_folder(cfg: SkyRLTrainConfig) -> Path:
    """Return ``log_path/project_name/run_name``, where config, metrics, report and console log of a run are."""
    trainer = cfg.trainer
    return Path(trainer.log_path) / trainer.project_name / trainer.run_name


def private_folder(path: Path) -> Path:
    """Make a folder, and those above it, for samples or tokens: its mode is that of the user's umask, without what it
    would let others than the group do. One that is there stays as it is. Returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o770, exist_ok=True)
    return path


def save_config(cfg: SkyRLTrainConfig) -> Path:
    """Write the resolved configuration to ``config.yaml`` in the run's folder; ``--config`` reads it back."""
    path = private_folder(run_folder(cfg)) / "config.yaml"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(get_config_as_yaml_str(cfg))
    beside.replace(path)
    return path
