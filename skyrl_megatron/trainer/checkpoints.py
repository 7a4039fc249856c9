"""The checkpointer of a run, the checkpoint that it resumes from, and when and where models are exported."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.source import HF_SUBFOLDER, FolderChanges
from skyrl_megatron.config.hf_model import cached_folder
from skyrl_megatron.errors import CheckpointError, ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.identity import (
    Identity,
    as_json,
    changed_settings,
    from_json,
    is_of_other,
    model_part,
    other_parts,
    read_identity,
    refuse_other,
    run_identity,
    settings_of,
    short,
    write_identity,
)
from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer, RoleRanks
from skyrl_megatron.runtime.checkpoint.store import (
    TRAINER_STATE,
    CheckpointStore,
    SavedCheckpoint,
    resume_candidates,
)

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


CONFIG = "config.json"
SETTINGS = "settings"
"""Entry of the trainer's state with the settings of the run."""


def run_checkpointer(
    cfg: SkyRLTrainConfig,
    roles: Mapping[str, RoleRanks],
    changes: Mapping[str, FolderChanges] | None = None,
    identity: Identity | None = None,
) -> Checkpointer:
    """Return the checkpointer of the trained ``roles``, under ``trainer.ckpt_path``.

    ``changes``: role → changes of the model's files, for conversion. ``identity``: of the
    run, which then continues no checkpoint of another one; None: nothing is compared.
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
        identity=None if identity is None else as_json(identity),
        accept=lambda checkpoint: None if identity is None else require_same_run(cfg, checkpoint, identity),
    )


def require_same_run(cfg: SkyRLTrainConfig, checkpoint: SavedCheckpoint, identity: Identity) -> None:
    """Raise ConfigError if a checkpoint is of another run than ``identity``. Warns of one that does not say."""
    if checkpoint.manifest.identity:
        refuse_other(resume_key(cfg), checkpoint.folder, from_json(checkpoint.manifest.identity), cfg, identity)
        return
    warnings.warn(
        f"{checkpoint.folder} does not say of which model and data it is, because an older version saved it: it is "
        "continued as that of this run",
        SkyRLMegatronWarning,
        stacklevel=2,
    )


def resume_key(cfg: SkyRLTrainConfig) -> str:
    """Return the setting that names the checkpoint to resume from."""
    return "trainer.resume_path" if cfg.trainer.resume_mode == "from_path" else "trainer.ckpt_path"


def is_same_run(cfg: SkyRLTrainConfig, checkpoint: SavedCheckpoint) -> bool:
    """Return whether the run may continue a checkpoint. A model that is gone is compared by its name, and data files,
    whose content takes long to read, are not compared."""
    saved, model = from_json(checkpoint.manifest.identity), model_part(cfg)
    gone = "model" in saved and not model.digest
    if gone and not saved["model"].shown.startswith(model.shown.removesuffix("()")):
        return False
    return not other_parts(saved, run_identity(cfg, data=()), cfg.trainer.resume_other)


def resume_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield a problem if the checkpoint that the run resumes from is of another run."""
    checkpoint = resumed_checkpoint(cfg)
    if checkpoint is None or not checkpoint.manifest.identity:
        return
    try:
        require_same_run(cfg, checkpoint, run_identity(cfg))
    except ConfigError as error:
        yield from error.problems


def resume_lines(cfg: SkyRLTrainConfig) -> Iterator[str]:
    """Yield what the run resumes from, and the settings that differ from those of the checkpoint."""
    if cfg.trainer.resume_mode in (None, "none"):
        yield "starts at step 0: trainer.resume_mode=none"
        return
    checkpoint = resumed_checkpoint(cfg)
    if checkpoint is None:
        yield f"starts at step 0: no checkpoint to resume from in {cfg.trainer.ckpt_path}"
        return
    model = checkpoint.manifest.identity.get("model", {}).get("shown")
    yield f"resumes from {checkpoint.folder} (step {checkpoint.step}{f', of {model}' if model else ''})"
    with contextlib.suppress(CheckpointError, OSError, ValueError):
        state = CheckpointStore(checkpoint.folder).read_json(checkpoint, TRAINER_STATE)
        if line := settings_line(state, cfg):
            yield line


def settings_line(state: Mapping[str, Any], cfg: SkyRLTrainConfig) -> str:
    """Return a line with the settings that changed since the trainer's ``state`` was saved; "" if none did."""
    changed = changed_settings(state.get(SETTINGS) or {}, settings_of(cfg))
    return f"continues with other settings: {', '.join(changed)}" if changed else ""


def _model_files(cfg: SkyRLTrainConfig, changes: Mapping[str, FolderChanges]) -> dict[str, bytes]:
    """Return path in a checkpoint → content, for config, tokenizer and license of the models of the roles."""
    contents: dict[str, bytes] = {}
    for role in {"policy", "critic"}.intersection(changes):
        folder = cached_folder(cfg, role, weights=False)
        if folder is not None and (folder / CONFIG).is_file():
            files = {CONFIG: (folder / CONFIG).read_bytes(), **changes[role].assets(folder)}
            if changes[role].config:
                config = json.loads(files[CONFIG]) | dict(changes[role].config)
                files[CONFIG] = json.dumps(config, indent=2).encode()
            contents |= {f"{role}/{HF_SUBFOLDER}/{name}": content for name, content in files.items()}
    return contents


def recorded_hub_commits(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return hub name → commit of the checkpoint that the run resumes from; {} if it starts at step 0."""
    checkpoint = resumed_checkpoint(cfg)
    return {} if checkpoint is None else dict(checkpoint.manifest.hub_commits)


def resumed_step(cfg: SkyRLTrainConfig) -> int:
    """Return the step of the checkpoint that the run resumes from; 0 if there is none."""
    checkpoint = resumed_checkpoint(cfg)
    return 0 if checkpoint is None else checkpoint.step


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


def prepare_export(export_path: str | Path, step: int, role: str = "policy", identity: Identity | None = None) -> Path:
    """Return :func:`export_folder` after removing an earlier export. Call it on one rank.

    ``identity``: of the run. Exports of another run in the folder of the step are not removed: the folder gets a name
    with ``of_`` and digits of their identity, which a warning says. Raises CheckpointError if the old export cannot
    be removed.
    """
    target = export_folder(export_path, step, role)
    try:
        if identity is not None:
            if is_of_other(target.parent, identity):
                other = short(read_identity(target.parent))
                aside = target.parent.with_name(f"{target.parent.name}.of_{other}")
                if aside.exists():
                    shutil.rmtree(aside)
                target.parent.rename(aside)
                moved = f"{target.parent} held the export of another run, which is now in {aside.name}"
                warnings.warn(moved, SkyRLMegatronWarning, stacklevel=2)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_identity(target.parent, identity)
        if target.exists():
            shutil.rmtree(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be replaced ({error.strerror}); check trainer.export_path") from error
    return target
