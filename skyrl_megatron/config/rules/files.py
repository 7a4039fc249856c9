"""Files that a run reads must be there. Checked by the commands, on the machine that starts the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv")


def file_problems(cfg: SkyRLTrainConfig, training: bool = True) -> Iterator[Problem]:
    """Yield missing datasets, chat template and checkpoint. ``training`` false: an evaluation reads no training data.

    Names that are no path (datasets on the hub, ``s3://…``) are left to whoever opens them.
    """
    lists = {"data.val_data": cfg.data.val_data}
    if training:
        lists = {"data.train_data": cfg.data.train_data} | lists
        if not cfg.data.train_data:
            yield Problem("data.train_data", [], "name at least one dataset")
    for key, paths in lists.items():
        for path in paths:
            if _is_path(path) and not Path(path).exists():
                hint = "; write it with python -m skyrl_megatron.data.prepare gsm8k" if "gsm8k" in path else ""
                yield Problem(key, path, f"no such file{hint}")
    template = cfg.generator.chat_template
    if template.source == "file":
        if not template.name_or_path:
            yield Problem("generator.chat_template.name_or_path", None, "source=file needs the path of a Jinja file")
        elif not Path(template.name_or_path).is_file():
            yield Problem("generator.chat_template.name_or_path", template.name_or_path, "no such file")
    resume = cfg.trainer.resume_path
    if cfg.trainer.resume_mode == "from_path" and resume and "://" not in resume and not Path(resume).is_dir():
        yield Problem("trainer.resume_path", resume, "no such folder")


def _is_path(name: str) -> bool:
    return "://" not in name and (name.startswith(("/", "./", "../")) or name.endswith(_SUFFIXES))
