"""When the policy is exported as a Hugging Face folder, and where to: ``runtime/hf/export.py`` writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl_megatron.errors import CheckpointError


def export_due(step: int, interval: int, *, is_last: bool) -> bool:
    """Return whether to export: every ``interval`` steps (``hf_save_interval``) and at the end; 0 or -1: never."""
    return interval > 0 and (is_last or step % interval == 0)


def export_folder(export_path: str | Path, step: int, role: str = "policy") -> Path:
    """Return the folder of a role's export: ``export_path/global_step_<step>/<role>``."""
    return Path(export_path).expanduser() / f"global_step_{step}" / role


def prepare_export(export_path: str | Path, step: int, role: str = "policy") -> Path:
    """Return :func:`export_folder`, freed of what an earlier run exported. Called on one rank.

    Raises CheckpointError when the old export cannot be removed.
    """
    target = export_folder(export_path, step, role)
    try:
        if target.exists():
            shutil.rmtree(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be replaced ({error.strerror}); check trainer.export_path") from error
    return target
