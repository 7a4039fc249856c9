"""Models, tokenizers and data sets of the Hugging Face hub, with the same commit on every node and one download each.

The driver of a run resolves each name to a commit once (:func:`pin`) and stores it in ``trainer.hub_commits``. All
processes, ``config.yaml``, checkpoints and exports use this commit, and a resumed run restores it from its checkpoint.
Which models a configuration names, and their folders on a node, is in ``config/hf_model.py``: nothing here knows of a
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from skyrl_megatron.errors import HubError, Problem
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

__all__ = [
    "FILE_SUFFIXES",
    "SMALL",
    "WHOLE",
    "DataSource",
    "HubReference",
    "Repo",
    "Say",
    "cached",
    "cached_commit",
    "data_folder",
    "data_sets",
    "data_source",
    "fetch",
    "is_hub_name",
    "model_card",
    "origin",
    "pin",
    "quiet",
    "resolve",
    "similar_folder",
]

_DATA = "datasets/"


class HubReference(NamedTuple):
    """A hub name in a configuration: key, value and repository."""

    key: str
    value: str
    repo: Repo


def pin(
    commits: dict[str, str], asked: Iterable[HubReference], recorded: Mapping[str, str], say: Say = quiet
) -> list[Problem]:
    """Fill ``commits`` (``Repo.key`` → commit) for the hub names in ``asked``, and download their small files to the
    cache.

    ``recorded``: commits of the checkpoint to resume from, which take precedence over the current commit of a branch.
    ``say`` gets the progress. Returns a problem for each name that does not exist, is not accessible, or cannot be
    resolved.
    """
    problems, done = [], set()
    for key, value, repo in asked:
        if repo.key in done:
            continue
        done.add(repo.key)
        try:
            commit = commits.get(repo.key) or recorded.get(repo.key) or resolve(repo, say=say)
            fetch(repo, commit, SMALL if repo.kind == "model" else CARD, say=say)
        except HubError as error:
            here = f"no local folder {repo.name}{similar_folder(repo.name)}. As a hub name: "
            problems.append(Problem(key, value, f"{here}{error}"))
            continue
        commits[repo.key] = commit
    return problems


def data_sets(key: str, entries: Iterable[str]) -> Iterator[HubReference]:
    """Yield the hub data sets among the entries of the configuration key ``key``."""
    for entry in entries:
        source = data_source(entry)
        if source is not None and isinstance(source.where, Repo):
            yield HubReference(key, entry, source.where)


def model_card(commits: Mapping[str, str], base: str | None) -> str | None:
    """Return ``README.md`` of an export with all hub names of the run and their commits; None without hub names.

    ``commits``: ``Repo.key`` → commit. ``base``: the trained model.
    """
    if not commits:
        return None
    names = [key.rpartition("@")[0] for key in commits]
    data = [name.removeprefix(_DATA) for name in names if name.startswith(_DATA)]
    lines = ["---", *([f"base_model: {base}"] if base in names else [])]
    lines += ["datasets:", *(f"- {name}" for name in dict.fromkeys(data))] if data else []
    lines += ["---", "", "Trained with skyrl-megatron. Inputs from the Hugging Face hub, with their commits:", ""]
    for key, commit in sorted(commits.items()):
        name, _, revision = key.rpartition("@")
        branch = "" if is_commit(revision) else f" ({revision})"
        lines.append(f"- {name}{branch}: `{commit}`")
    return "\n".join(lines) + "\n"
