"""Folders that the run writes to: tried with a file that is removed again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config.paths import is_address
from skyrl_megatron.config.rules.fully_async import runs_ahead
from skyrl_megatron.config.rules.training import LONGEST_NAME
from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem, shown

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


def folders(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield folders for logs, checkpoints and exports that cannot be written or made, and a checkpoint to resume from
    that is not there."""
    trainer = run.cfg.trainer
    resume = trainer.resume_path
    if trainer.resume_mode == "from_path" and resume and not is_address(resume) and not os.path.isdir(resume):
        yield Problem("trainer.resume_path", resume, "no such folder")
    named = all(len(name.encode()) <= LONGEST_NAME for name in (trainer.project_name, trainer.run_name))
    logs = run_folder(run.cfg) if named else Path(trainer.log_path)  # the rules report names that are too long
    wanted = {"trainer.log_path": (trainer.log_path, logs)}
    if run.training:
        wanted["trainer.ckpt_path"] = (trainer.ckpt_path, Path(trainer.ckpt_path))
    if run.training and runs_ahead(run.cfg) and (path := trainer.fully_async.rollouts_path):
        wanted["trainer.fully_async.rollouts_path"] = (path, Path(path))
    if _exports(run.cfg, run.training):
        wanted["trainer.export_path"] = (trainer.export_path, Path(trainer.export_path))
    for key, (value, folder) in wanted.items():
        if is_address(value):
            yield NotChecked(f"{key}={value}", "an object store: whether it can be written shows at the first save")
        elif why := cannot_write(folder):
            yield Problem(key, value, f"{why}; name a folder that you can write to")


def _exports(cfg: SkyRLTrainConfig, training: bool) -> bool:
    """Return whether anything is written to ``export_path``."""
    trainer = cfg.trainer
    evaluates = not training or trainer.eval_before_train or trainer.eval_interval > 0
    dumps = trainer.dump_eval_results and bool(cfg.data.val_data) and evaluates
    return dumps or (training and (trainer.hf_save_interval > 0 or trainer.dump_data_batch))


def cannot_write(folder: Path) -> str | None:
    """Say why no file can be made in ``folder``, or the folder itself cannot; None if it can.

    Tried in the folder, or in the nearest one above it that exists.
    """
    existing = folder.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # a name that no file system takes
        return f"{shown(folder)} cannot be made ({error.strerror})"
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".skyrl-megatron-", dir=existing) as probe:
            (Path(probe) / "probe").write_bytes(b"\0")
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{existing} cannot be written ({reason}{_owner(existing)})"
    return None


def _owner(folder: Path) -> str:
    """Name whose folder it is, if not the user's own."""
    owner = folder.stat().st_uid
    if owner == os.getuid():
        return ""
    try:
        return f"; it belongs to {folder.owner()}"
    except KeyError:
        return f"; it belongs to user {owner}"
