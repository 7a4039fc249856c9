"""The checkpointer of a run, the checkpoint that it resumes from, and when and where models are exported."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.source import HF_SUBFOLDER, FolderChanges
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.hub import cached_folder
from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer, RoleRanks
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore, SavedCheckpoint, resume_candidates

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


CONFIG = "config.json"


def run_checkpointer(
    cfg: SkyRLTrainConfig, roles: Mapping[str, RoleRanks], changes: Mapping[str, FolderChanges] | None = None
) -> Checkpointer:
    """Return the checkpointer of the trained ``roles``, under ``trainer.ckpt_path``.

    ``changes``: role → changes of the model's files, for conversion.
    With ``megatron_config.async_dist_ckpt_save``, a save returns once all ranks have copied their state.
    """
    return Checkpointer(
        cfg.trainer.ckpt_path,
        roles,
        keep=cfg.trainer.max_ckpts_to_keep,
        hub_commits=cfg.trainer.hub_commits,
        asynchronous=cfg.trainer.policy.megatron_config.async_dist_ckpt_save,
        timeout_s=cfg.trainer.phase_timeout_s,
        model_files=_model_files(cfg, {role: (changes or {}).get(role, FolderChanges()) for role in roles}),
    )


def _model_files(cfg: SkyRLTrainConfig, changes: Mapping[str, FolderChanges]) -> dict[str, bytes]:
    """Return path in a checkpoint → content, for config, tokenizer and license of the models of the roles."""
    found: dict[str, bytes] = {}
    for role in {"policy", "critic"}.intersection(changes):
        folder = cached_folder(cfg, role, weights=False)
        if folder is not None and (folder / CONFIG).is_file():
            files = {CONFIG: (folder / CONFIG).read_bytes(), **changes[role].assets(folder)}
            if changes[role].config:
                config = json.loads(files[CONFIG]) | dict(changes[role].config)
                files[CONFIG] = json.dumps(config, indent=2).encode()
            found |= {f"{role}/{HF_SUBFOLDER}/{name}": content for name, content in files.items()}
    return found


def recorded_hub_commits(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return hub name → commit of the checkpoint that the run resumes from; {} if it starts at step 0."""
    found = resumed_checkpoint(cfg)
    return {} if found is None else dict(found.manifest.hub_commits)


def resumed_step(cfg: SkyRLTrainConfig) -> int:
    """Return the step of the checkpoint that the run resumes from; 0 if there is none."""
    found = resumed_checkpoint(cfg)
    return 0 if found is None else found.step


def resumed_checkpoint(cfg: SkyRLTrainConfig) -> SavedCheckpoint | None:
    """Return the checkpoint that the run resumes from, None if it starts at step 0. Errors of a checkpoint are
    reported when the run loads it."""
    trainer = cfg.trainer
    with warnings.catch_warnings(), contextlib.suppress(CheckpointError, StopIteration, OSError):
        warnings.simplefilter("ignore")
        return next(resume_candidates(CheckpointStore(trainer.ckpt_path), trainer.resume_mode, trainer.resume_path))
    return None


def export_due(step: int, interval: int, *, is_last: bool) -> bool:
    """Return whether to export at ``step``: every ``interval`` steps (``hf_save_interval``) and at the last step.
    0 and -1 disable exports."""
    return interval > 0 and (is_last or step % interval == 0)


def export_folder(export_path: str | Path, step: int, role: str = "policy") -> Path:
    """Return the folder of a role's export: ``export_path/global_step_<step>/<role>``."""
    return Path(export_path).expanduser() / f"global_step_{step}" / role


def prepare_export(export_path: str | Path, step: int, role: str = "policy") -> Path:
    """Return :func:`export_folder` after removing an earlier export. Call it on one rank.

    Raises CheckpointError if the old export cannot be removed.
    """
    target = export_folder(export_path, step, role)
    try:
        if target.exists():
            shutil.rmtree(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be replaced ({error.strerror}); check trainer.export_path") from error
    return target
