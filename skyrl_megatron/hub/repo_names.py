"""Names of the Hugging Face hub, and messages for its errors with cause and fix."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skyrl_megatron.errors import HubError

DEFAULT_BRANCH = "main"
FILE_SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv")
"""Suffixes of data files, which hub names do not have."""

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT_MARK = re.compile(r":(?![^\[]*\])")  # not the colon of a slice, as in train[:100]


@dataclass(frozen=True, slots=True)
class Repo:
    """A reference to a hub repository in a configuration."""

    kind: Literal["model", "dataset"]
    name: str
    """``org/name``."""
    revision: str | None = None
    """Branch, tag or commit; None means the default branch."""
    adapter: bool = False
    """Whether it must be an adapter in PEFT format."""

    @property
    def key(self) -> str:
        """``[datasets/]org/name@revision``, the key in ``trainer.hub_commits``."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.name}@{self.revision or DEFAULT_BRANCH}"

    @property
    def commit(self) -> str | None:
        """The revision if it is a full commit hash, else None."""
        return self.revision if self.revision and is_commit(self.revision) else None


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set on the hub or in a folder: location, subset, and split or slice of a split."""

    where: Repo | Path
    subset: str | None = None
    split: str = "train"


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form of a hub name and no local file or folder has it."""
    formed = _NAME.fullmatch(name) is not None and len(name) <= 96
    return formed and "--" not in name and ".." not in name and not name.endswith(".git") and not os.path.exists(name)


def similar_folder(path: str) -> str:
    """Return `` (did you mean NAME?)`` if a sibling of the missing folder ``path`` has a similar name, else ""."""
    folder = Path(path).expanduser()
    try:
        siblings = [each.name for each in folder.absolute().parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(folder.name, siblings, n=1)
    return f" (did you mean {folder.with_name(found[0])}?)" if found else ""


def origin(folder: Path) -> Repo | None:
    """Return repository and commit if ``folder`` is a snapshot of a model in a hub cache, else None."""
    kind, *name = folder.parents[1].name.split("--") if len(folder.parents) > 1 else [""]
    if folder.parent.name != "snapshots" or kind != "models" or not is_commit(folder.name):
        return None
    return Repo("model", "/".join(name), folder.name)


def is_commit(revision: str) -> bool:
    """Return whether ``revision`` is a full commit hash."""
    return _COMMIT.fullmatch(revision) is not None


def data_source(entry: str) -> DataSource | None:
    """Parse ``NAME[@REVISION][:SUBSET][:SPLIT]`` of ``data.train_data``; a single part after the name is the split.

    Returns None if it is neither a local folder nor a hub name: files, and URLs (``s3://…``).
    """
    if "://" in entry or entry.lower().endswith(FILE_SUFFIXES):
        return None
    location, *parts = _SPLIT_MARK.split(entry)
    name, _, revision = location.partition("@")
    split = parts.pop() if parts else "train"
    subset = parts.pop() if parts else None
    folder = Path(location).expanduser()
    if parts:
        return None
    if os.path.isdir(folder):
        return DataSource(folder, subset, split)
    return DataSource(Repo("dataset", name, revision or None), subset, split) if is_hub_name(name) else None


LOGIN = "HF_TOKEN, or hf auth login"


def explain(error: BaseException, repo: Repo) -> HubError:
    """Return the HubError to raise instead of ``error``, which occurred in a request for files of ``repo``."""
    from huggingface_hub import constants, errors

    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, HubError):
            return cause
        if isinstance(cause, errors.GatedRepoError):
            token_place = _token_place()
            token = (
                f"; the token in {token_place} has no access"
                if token_place
                else f" and set a token of that account ({LOGIN})"
            )
            return HubError(f"{repo.name} is gated: request access at {_page(repo)}{token}")
        if isinstance(cause, errors.RevisionNotFoundError):
            return HubError(f"{_page(repo)} has no branch, tag or commit {repo.revision or 'main'!r}")
        if isinstance(cause, errors.RepositoryNotFoundError):
            return HubError(_not_found(repo))
        if isinstance(cause, errors.HfHubHTTPError):
            return HubError(_refused(cause.response.status_code, cause, repo))
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return HubError(f"no space left in {cache()} for {repo.name}: free space, or set HF_HOME to a larger disk")
        if isinstance(cause, PermissionError):
            return HubError(
                f"{cause.filename or cache()} is not writable: set HF_HOME to a folder that you can write to"
            )
    if constants.HF_HUB_OFFLINE:
        return offline(repo)
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{repo.name} is not a valid hub name: write ORG/NAME")
    return HubError(f"{constants.ENDPOINT} cannot be reached ({_short(chain[-1])}). {_beforehand(repo)}")


def offline(repo: Repo) -> HubError:
    """Return the error for files missing in the cache in offline mode."""
    return HubError(
        f"HF_HUB_OFFLINE is set, and {cache()} (HF_HOME) does not hold all of {repo.key}: unset HF_HUB_OFFLINE if "
        f"there is a network. {_beforehand(repo)}"
    )


def silent(repo: Repo) -> HubError:
    """Return the error for a stalled download."""
    from huggingface_hub import constants

    return HubError(
        f"the download from {constants.ENDPOINT} has stalled: run the same command to continue it. {_beforehand(repo)}"
    )


def cache() -> Path:
    """Return the cache folder (HF_HUB_CACHE, default ``HF_HOME/hub``)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _beforehand(repo: Repo) -> str:
    kind = " --repo-type dataset" if repo.kind == "dataset" else ""
    revision = f" --revision {repo.revision}" if repo.revision else ""
    return (
        f"For nodes without network run 'HF_HOME=/SHARED/FOLDER hf download {repo.name}{kind}{revision}' on a machine "
        "with network, and start the run with that HF_HOME and HF_HUB_OFFLINE=1"
    )


def _not_found(repo: Repo) -> str:
    from huggingface_hub import constants

    place = _token_place()
    private = f"the token in {place} has no access to it" if place else f"it is private and no token is set ({LOGIN})"
    kind = "model" if repo.kind == "model" else "data set"
    return (
        f"there is no folder {Path(repo.name).absolute()}, and {constants.ENDPOINT} has no {kind} {repo.name}, or "
        f"{private}: correct the name"
    )


def _refused(status: int, error: BaseException, repo: Repo) -> str:
    from huggingface_hub import constants

    token_place = _token_place()
    if status == 401 and token_place is None:  # the hub also returns 401 for names that do not exist
        return _not_found(repo)
    if status in (401, 403):
        request = f"the token in {token_place}" if token_place else "a request without token"
        return (
            f"{constants.ENDPOINT} refuses {request} for {repo.name} (HTTP {status}): create a token with access at "
            f"{constants.ENDPOINT}/settings/tokens and set it ({LOGIN})"
        )
    if status == 404:
        return f"{repo.key} lacks a file of its file list: {_short(error)}; check HF_ENDPOINT"
    return f"{constants.ENDPOINT} returns HTTP {status} for {repo.name}: try again later. {_beforehand(repo)}"


def _page(repo: Repo) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"


def _token_place() -> str | None:
    """Return where the current token is stored; None if there is no token."""
    from huggingface_hub import constants, get_token

    if get_token() is None:
        return None
    return "HF_TOKEN" if os.environ.get("HF_TOKEN") else constants.HF_TOKEN_PATH


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _short(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
