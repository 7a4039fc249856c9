"""Models, tokenizers and data sets of the Hugging Face hub, with the same commit on every node and one download each.

The driver of a run resolves each name to a commit once (:func:`pin`) and stores it in ``trainer.hub_commits``. All
processes, ``config.yaml``, checkpoints and exports use this commit, and a resumed run restores it from its checkpoint.
A process that opens a model calls :func:`model_folder` on its node.
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
from skyrl_megatron.hub.repo_names import (
    FILE_SUFFIXES,
    DataSource,
    Repo,
    data_source,
    is_commit,
    is_hub_name,
    origin,
    similar_folder,
)

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_DATA = "datasets/"


def model_card(cfg: SkyRLTrainConfig) -> str | None:
    """Return ``README.md`` of an export with all hub names of the run and their commits; None without hub names."""
    commits = cfg.trainer.hub_commits
    if not commits:
        return None
    names = [key.rpartition("@")[0] for key in commits]
    data = [name.removeprefix(_DATA) for name in names if name.startswith(_DATA)]
    base = cfg.trainer.policy.model.path
    lines = ["---", *([f"base_model: {base}"] if base in names else [])]
    lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(data))] if data else []
    lines += ["---", "", "Trained with skyrl-megatron. Inputs from the Hugging Face hub, with their commits:", ""]
    for key, commit in sorted(commits.items()):
        name, _, revision = key.rpartition("@")
        branch = "" if is_commit(revision) else f" ({revision})"
        lines.append(f"- {name}{branch}: `{commit}`")
    return "\n".join(lines) + "\n"


__all__ = [
    "ADAPTER",
    "FILE_SUFFIXES",
    "WHOLE",
    "DataSource",
    "HubReference",
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
    "origin",
    "pin",
    "resolve",
    "similar_folder",
]


ADAPTER = "adapter"
"""Used as a role: the initial adapter of the policy."""


class HubReference(NamedTuple):
    """A hub name in a configuration: key, value and repository."""

    key: str
    value: str
    repo: Repo


def model_repo(cfg: SkyRLTrainConfig, role: str) -> Repo | None:
    """Return the hub repository of a role's model; None for a local folder."""
    _, path, revision = _named(cfg, role)
    repo = Repo("model", path, revision, role == ADAPTER)
    return repo if repo.key in cfg.trainer.hub_commits or is_hub_name(repo.name) else None


def _named(cfg: SkyRLTrainConfig, role: str) -> tuple[str, str, str | None]:
    """Return (configuration key, name or folder, revision) of a role's model. Named teachers are ``teacher/NAME``."""
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
    """Return the folder of the initial adapter, see :func:`model_folder`; None if training starts with a new one."""
    return model_folder(cfg, ADAPTER) if cfg.trainer.policy.model.lora.adapter_path else None


def model_folder(cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True, say: Say = quiet) -> Path:
    """Return the folder of a role's model on this node. Without ``weights``: configuration and tokenizer only.

    Downloads a hub model that is not in the cache of this node; ``say`` gets the progress. Raises ConfigError with the
    key ``trainer.ROLE.model.path`` and the fix.
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
    """Return the result of :func:`model_folder`, or None if the model is not in the cache."""
    repo = model_repo(cfg, role)
    if repo is None:
        return model_folder(cfg, role)
    commit = cfg.trainer.hub_commits.get(repo.key) or cached_commit(repo)
    return cached(repo, commit, WHOLE if weights else SMALL) if commit else None


def pin(
    cfg: SkyRLTrainConfig, asked: Iterable[HubReference], recorded: Mapping[str, str], say: Say = quiet
) -> list[Problem]:
    """Fill ``trainer.hub_commits`` for the hub names in ``asked``, and download their small files to the cache.

    ``recorded``: commits of the checkpoint to resume from, which take precedence over the current commit of a branch.
    ``say`` gets the progress. Returns a problem for each name that does not exist, is not accessible, or cannot be
    resolved.
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
            hint = similar_folder(repo.name)
            here = f"no local folder {repo.name}{hint}. As a hub name: " if hint or "/" not in repo.name else ""
            problems.append(Problem(key, value, f"{here}{error}"))
            continue
        commits[repo.key] = commit
    return problems


def models(cfg: SkyRLTrainConfig, roles: Sequence[str]) -> Iterator[HubReference]:
    """Yield the hub models of ``roles``, and the initial adapter of the policy."""
    for role in (*roles, ADAPTER):
        if repo := model_repo(cfg, role):
            yield HubReference(_named(cfg, role)[0], repo.name, repo)


def data_sets(key: str, entries: Iterable[str]) -> Iterator[HubReference]:
    """Yield the hub data sets among the entries of the configuration key ``key``."""
    for entry in entries:
        source = data_source(entry)
        if source is not None and isinstance(source.where, Repo):
            yield HubReference(key, entry, source.where)
