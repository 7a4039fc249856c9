"""The folder of a run's logs, and the resolved configuration kept in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config.schema.root import get_config_as_yaml_str

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig


def run_folder(cfg: SkyRLTrainConfig) -> Path:
    """Return ``log_path/project_name/run_name``, where config, metrics, report and console log of a run are."""
    trainer = cfg.trainer
    return Path(trainer.log_path) / trainer.project_name / trainer.run_name


def save_config(cfg: SkyRLTrainConfig) -> Path:
    """Write the resolved configuration to ``config.yaml`` in the run's folder; ``--config`` reads it back."""
    path = run_folder(cfg) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(get_config_as_yaml_str(cfg))
    beside.replace(path)
    return path
