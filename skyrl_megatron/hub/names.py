"""What a name on the Hugging Face hub looks like, for models and for data sets."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_BRANCH = "main"
FILE_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv")
"""What files of data end in, and hub names do not."""

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT_MARK = re.compile(r":(?![^\[]*\])")  # not those of a slice, as in train[:100]


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository of the hub, as a configuration asks for it."""

    kind: Literal["model", "dataset"]
    name: str
    """``org/name``."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""
    adapter: bool = False
    """Whether it is asked for as a model's adapter, in PEFT's form."""

    @property
    def key(self) -> str:
        """``[datasets/]org/name@revision``: what ``trainer.hub_commits`` calls it."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.name}@{self.revision or DEFAULT_BRANCH}"

    @property
    def commit(self) -> str | None:
        """The revision, where it is a whole commit hash."""
        return self.revision if self.revision and is_commit(self.revision) else None


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set that is no file: ``repo`` on the hub or ``folder``, its subset, its split or a slice of one."""

    where: Repo | Path
    subset: str | None = None
    split: str = "train"


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` is one of the hub: by its form, and because no file or folder here has it."""
    formed = _NAME.fullmatch(name) is not None and len(name) <= 96
    return formed and "--" not in name and ".." not in name and not name.endswith(".git") and not os.path.exists(name)


def near(path: str) -> str:
    """Return `` (did you mean NAME?)`` where a folder beside the one that ``path`` names, which is not there, has
    nearly its name; "" else."""
    folder = Path(path).expanduser()
    try:
        beside = [each.name for each in folder.absolute().parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(folder.name, beside, n=1)
    return f" (did you mean {folder.with_name(found[0])}?)" if found else ""


def origin(folder: Path) -> Repo | None:
    """Return the repository and commit that ``folder`` is the snapshot of in a cache of the hub; None: of none."""
    kind, *name = folder.parents[1].name.split("--") if len(folder.parents) > 1 else [""]
    if folder.parent.name != "snapshots" or kind != "models" or not is_commit(folder.name):
        return None
    return Repo("model", "/".join(name), folder.name)


def is_commit(revision: str) -> bool:
    """Return whether ``revision`` is a whole commit hash."""
    return _COMMIT.fullmatch(revision) is not None


def data_source(entry: str) -> DataSource | None:
    """Read ``NAME[@REVISION][:SUBSET][:SPLIT]`` of ``data.train_data``; one part after the name is the split.

    None for what is neither a folder here nor a hub name: files, and addresses (``s3://…``).
    """
    if "://" in entry or entry.lower().endswith(FILE_SUFFIXES):
        return None
    place, *parts = _SPLIT_MARK.split(entry)
    name, _, revision = place.partition("@")
    split = parts.pop() if parts else "train"
    subset = parts.pop() if parts else None
    folder = Path(place).expanduser()
    if parts:
        return None
    if os.path.isdir(folder):
        return DataSource(folder, subset, split)
    return DataSource(Repo("dataset", name, revision or None), subset, split) if is_hub_name(name) else None
