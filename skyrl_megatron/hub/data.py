"""Data sets of the hub: which of a repository's files a subset needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.hub.download import CARD, STALL_S, Say, fetch, quiet, resolve
from skyrl_megatron.hub.names import Repo

DATA = ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.arrow", "*.txt", "*.gz", "*.zip", "*.zst", "*.xz", "*.bz2")


def data_folder(
    repo: Repo, subset: str | None, commits: Mapping[str, str], *, say: Say = quiet, stall_s: float = STALL_S
) -> Path:
    """Return the folder of a data set's files, downloaded where they are missing.

    ``commits``: ``trainer.hub_commits``. Of a repository whose card lists its subsets, only the files of ``subset``
    (None: the default one) are fetched. Raises HubError.
    """
    commit = commits.get(repo.key) or resolve(repo, say=say)
    card = fetch(repo, commit, CARD, say=say)
    return fetch(repo, commit, (*CARD, *(_patterns(card / "README.md", subset) or DATA)), say=say, stall_s=stall_s)


def _patterns(card: Path, subset: str | None) -> list[str]:
    """Return patterns of the files that loading ``subset`` opens; empty where the card does not say.

    ``datasets`` finds the format by the files of the first subset, which are therefore among them.
    """
    from huggingface_hub import DatasetCard

    if not card.is_file():
        return []
    configs = DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs") or []
    named = {config.get("config_name"): config for config in configs if isinstance(config, dict)}
    wanted = [config for config in configs if config.get("default")] or configs[:1]
    chosen = [named[subset]] if subset in named else named.values() if subset else wanted
    found = [[*_paths(config.get("data_files"))] for config in (*configs[:1], *chosen)]
    if not all(found) or any("data_dir" in config for config in configs):
        return []
    paths = [path.removeprefix("./") for paths in found for path in paths]
    return [*dict.fromkeys([*paths, *(path.replace("**/", "") for path in paths)])]


def _paths(files: Any) -> Iterator[str]:
    """Yield the patterns of ``data_files``: a pattern, several, or some for each split."""
    if isinstance(files, str):
        yield files
    elif isinstance(files, Mapping):
        yield from _paths(files.get("path"))
    else:
        for each in files or []:
            yield from _paths(each)
