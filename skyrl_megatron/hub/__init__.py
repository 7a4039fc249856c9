"""Models, tokenizers and data sets by their name on the Hugging Face hub: one download, one commit, every node.

A run asks once, on its driver, which commit each name is (:func:`pin`); ``trainer.hub_commits`` then says it to every
process, to ``config.yaml``, to checkpoints and to exports, and a resumed run gets it back from its checkpoint. Whoever
opens a model asks :func:`model_folder`, on its own node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from skyrl_megatron.errors import ConfigError, HubError, Problem
from skyrl_megatron.hub.download import (
    CARD,
    SMALL,
    WHOLE,
    Say,
    cached,
    cached_commit,
    data_folder,
    fetch,
    quiet,
    resolve,
)
from skyrl_megatron.hub.names import FILE_SUFFIXES, DataSource, Repo, data_source, is_commit, is_hub_name, near, origin

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_DATA = "datasets/"


def model_card(cfg: SkyRLTrainConfig) -> str | None:
    """Return ``README.md`` of an export with every hub name of the run and its commit; None if there is none."""
    commits = cfg.trainer.hub_commits
    if not commits:
        return None
    names = [key.rpartition("@")[0] for key in commits]
    data = [name.removeprefix(_DATA) for name in names if name.startswith(_DATA)]
    base = cfg.trainer.policy.model.path
    lines = ["---", *([f"base_model: {base}"] if base in names else [])]
    lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(data))] if data else []
    lines += ["---", "", "Trained with skyrl-megatron. What was read from the Hugging Face hub, and its commit:", ""]
    for key, commit in sorted(commits.items()):
        name, _, revision = key.rpartition("@")
        asked = "" if is_commit(revision) else f" ({revision})"
        lines.append(f"- {name}{asked}: `{commit}`")
    return "\n".join(lines) + "\n"


__all__ = [
    "ADAPTER",
    "FILE_SUFFIXES",
    "WHOLE",
    "Asked",
    "DataSource",
    "Repo",
    "adapter_folder",
    "cached_folder",
    "data_folder",
    "data_sets",
    "data_source",
    "fetch",
    "is_hub_name",
    "model_card",
    "model_folder",
    "model_repo",
    "models",
    "near",
    "origin",
    "pin",
    "resolve",
]


ADAPTER = "adapter"
"""Stands where a role may: the adapter that the policy's training starts from."""


class Asked(NamedTuple):
    """A hub name in a configuration."""

    key: str
    value: str
    repo: Repo


def model_repo(cfg: SkyRLTrainConfig, role: str) -> Repo | None:
    """Return the repository of a role's model; None for a folder."""
    _, path, revision = _named(cfg, role)
    repo = Repo("model", path, revision, role == ADAPTER)
    return repo if repo.key in cfg.trainer.hub_commits or is_hub_name(repo.name) else None


def _named(cfg: SkyRLTrainConfig, role: str) -> tuple[str, str, str | None]:
    """Return (key, name or folder, revision) of a role's model; of a teacher with a name that of ``teacher/NAME``."""
    if role.startswith("teacher/"):
        return "trainer.teacher.models", cfg.trainer.teacher.models[role.removeprefix("teacher/")], None
    if role != ADAPTER:
        model = getattr(cfg.trainer, role).model
        return f"trainer.{role}.model.path", model.path or "", model.revision
    path = cfg.trainer.policy.model.lora.adapter_path or ""
    name, _, revision = path.partition("@")
    return "trainer.policy.model.lora.adapter_path", *(
        (path, None) if os.path.exists(path) else (name, revision or None)
    )


def adapter_folder(cfg: SkyRLTrainConfig) -> Path | None:
    """Return the folder of the adapter that training starts from, as :func:`model_folder`; None: it starts anew."""
    return model_folder(cfg, ADAPTER) if cfg.trainer.policy.model.lora.adapter_path else None


def model_folder(cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True, say: Say = quiet) -> Path:
    """Return the folder of a role's model on this node. ``weights`` false: configuration and tokenizer are enough.

    A hub model is fetched to this node's cache if it is not there; ``say`` gets its progress. Raises ConfigError,
    naming ``trainer.ROLE.model.path`` and the fix.
    """
    repo = model_repo(cfg, role)
    if repo is None:
        return Path(_named(cfg, role)[1]).expanduser()
    try:
        commit = cfg.trainer.hub_commits.get(repo.key) or resolve(repo)
        return fetch(repo, commit, WHOLE if weights else SMALL, say=say, stall_s=cfg.trainer.phase_timeout_s)
    except HubError as error:
        raise ConfigError([Problem(_named(cfg, role)[0], repo.name, str(error))]) from error


def cached_folder(cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True) -> Path | None:
    """Return what :func:`model_folder` does, or None where it would have to ask the hub."""
    repo = model_repo(cfg, role)
    if repo is None:
        return model_folder(cfg, role)
    commit = cfg.trainer.hub_commits.get(repo.key) or cached_commit(repo)
    return cached(repo, commit, WHOLE if weights else SMALL) if commit else None


def pin(cfg: SkyRLTrainConfig, asked: Iterable[Asked], recorded: Mapping[str, str], say: Say = quiet) -> list[Problem]:
    """Fill ``trainer.hub_commits`` for the hub names in ``asked``, with their small files in the cache.

    ``recorded``: commits of the checkpoint that the run continues from, which count where a branch has moved since.
    ``say`` gets the progress of what takes long.
    Returns a problem for each name that is misspelt, may not be read, or cannot be asked for.
    """
    problems, commits, done = [], cfg.trainer.hub_commits, set()
    for key, value, repo in asked:
        if repo.key in done:
            continue
        done.add(repo.key)
        try:
            commit = commits.get(repo.key) or recorded.get(repo.key) or resolve(repo, say=say)
            fetch(repo, commit, SMALL if repo.kind == "model" else CARD, say=say)
        except HubError as error:
            hint = near(repo.name)
            here = f"no folder {repo.name} here{hint}. As a name of the hub: " if hint or "/" not in repo.name else ""
            problems.append(Problem(key, value, f"{here}{error}"))
            continue
        commits[repo.key] = commit
    return problems


def models(cfg: SkyRLTrainConfig, roles: Sequence[str]) -> Iterator[Asked]:
    """Yield the hub models of ``roles``, and the adapter that the policy starts from."""
    for role in (*roles, ADAPTER):
        if repo := model_repo(cfg, role):
            yield Asked(_named(cfg, role)[0], repo.name, repo)


def data_sets(key: str, entries: Iterable[str]) -> Iterator[Asked]:
    """Yield the data sets of the hub among the entries of ``key``."""
    for entry in entries:
        source = data_source(entry)
        if source is not None and isinstance(source.where, Repo):
            yield Asked(key, entry, source.where)
