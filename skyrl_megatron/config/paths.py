"""Paths are the user's: a relative one is meant from the folder in which the command was typed, wherever it is used.

They become absolute when a configuration is filled in, so that ``config.yaml`` and every process of the run, those on
other nodes included, have the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from skyrl_megatron.config.fields import Section, get_path, owner_of
from skyrl_megatron.hub import FILE_SUFFIXES, is_hub_name


def is_address(path: str) -> bool:
    """Return whether ``path`` names a place beyond the file system: ``s3://…``."""
    return "://" in path


def is_data_file(name: str) -> bool:
    """Return whether a data set is named by its path, and not by its name on the hub."""
    return not is_address(name) and (name.startswith(("/", "./", "../", "~")) or name.endswith(FILE_SUFFIXES))


def absolute(path: str) -> str:
    """Return ``path`` with ``~`` expanded, from the root of the file system; addresses and empty text as they are."""
    if not path or is_address(path):
        return path
    expanded = os.path.expanduser(path)
    return expanded if os.path.isabs(expanded) else os.path.abspath(expanded)


def _model(path: str) -> str:
    return path if is_hub_name(path) else absolute(path)


def _data(name: str) -> str:
    return absolute(name) if is_data_file(name) or os.path.exists(name) else name


_ROLES = ("policy", "ref", "critic", "teacher")
_PATHS: dict[str, Callable[[str], str]] = {
    "data.train_data": _data,
    "data.val_data": _data,
    **{f"trainer.{role}.model.path": _model for role in _ROLES},
    **{f"trainer.{role}.megatron_config.torch_profiler_config.save_path": absolute for role in _ROLES},
    "trainer.ckpt_path": absolute,
    "trainer.export_path": absolute,
    "trainer.fully_async.rollouts_path": absolute,
    "trainer.fully_async.replay_from": absolute,
    "trainer.log_path": absolute,
    "trainer.resume_path": absolute,
    "generator.inference_engine.http_token_path": absolute,
    "environment.skyrl_gym.text2sql.db_path": absolute,
}


def make_paths_absolute(cfg: Section) -> None:
    """Make every path of a SkyRLTrainConfig absolute. May be repeated."""
    for key, make in _PATHS.items():
        _replace(cfg, key, make)
    teachers: dict[str, str] = get_path(cfg, "trainer.teacher.models")
    teachers.update({name: model if is_address(model) else _model(model) for name, model in teachers.items()})
    if get_path(cfg, "generator.chat_template.source") == "file":
        _replace(cfg, "generator.chat_template.name_or_path", absolute)


def _replace(cfg: Section, key: str, make: Callable[[str], str]) -> None:
    section, name = owner_of(cfg, key)
    value: Any = getattr(section, name)
    if isinstance(value, str):
        setattr(section, name, make(value))
    elif value:
        setattr(section, name, [make(path) for path in value])
