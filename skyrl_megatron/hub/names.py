"""Names on the Hugging Face hub, and its errors as one sentence with cause and fix."""

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


LOGIN = "HF_TOKEN, or hf auth login"


def explain(error: BaseException, repo: Repo) -> HubError:
    """Return what to raise instead of ``error``, which came up when files of ``repo`` were asked for."""
    from huggingface_hub import constants, errors

    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, HubError):
            return each
        if isinstance(each, errors.GatedRepoError):
            place = _token_place()
            token = f"; the token in {place} has none" if place else f" and set a token of that account ({LOGIN})"
            return HubError(f"{repo.name} is gated: ask for access at {_page(repo)}{token}")
        if isinstance(each, errors.RevisionNotFoundError):
            return HubError(f"{_page(repo)} has no branch, tag or commit {repo.revision or 'main'!r}")
        if isinstance(each, errors.RepositoryNotFoundError):
            return HubError(_not_found(repo))
        if isinstance(each, errors.HfHubHTTPError):
            return HubError(_refused(each.response.status_code, each, repo))
        if isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT):
            return HubError(f"no space left in {cache()} for {repo.name}: free some, or set HF_HOME to a larger disk")
        if isinstance(each, PermissionError):
            return HubError(f"{each.filename or cache()} cannot be written: set HF_HOME to a folder of your own")
    if constants.HF_HUB_OFFLINE:
        return offline(repo)
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{repo.name} is no name of the hub: write ORG/NAME")
    return HubError(f"{constants.ENDPOINT} cannot be reached ({_short(chain[-1])}). {_beforehand(repo)}")


def offline(repo: Repo) -> HubError:
    """Return the error for files that are not in the cache while the hub must not be asked."""
    return HubError(
        f"HF_HUB_OFFLINE is set, and {cache()} (HF_HOME) does not hold {repo.key} whole; unset HF_HUB_OFFLINE where "
        f"there is a network. {_beforehand(repo)}"
    )


def silent(repo: Repo) -> HubError:
    """Return the error for a hub from which nothing comes any more."""
    from huggingface_hub import constants

    return HubError(
        f"nothing comes from {constants.ENDPOINT}; the same command fetches what is still missing. {_beforehand(repo)}"
    )


def cache() -> Path:
    """Return the folder of all downloads (HF_HUB_CACHE, by default ``HF_HOME/hub``)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _beforehand(repo: Repo) -> str:
    kind = " --repo-type dataset" if repo.kind == "dataset" else ""
    revision = f" --revision {repo.revision}" if repo.revision else ""
    return (
        f"For nodes without network run 'HF_HOME=/SHARED/FOLDER hf download {repo.name}{kind}{revision}' on a machine "
        "that has one, and start the run with that HF_HOME and HF_HUB_OFFLINE=1"
    )


def _not_found(repo: Repo) -> str:
    from huggingface_hub import constants

    place = _token_place()
    private = f"the token in {place} does not open it" if place else f"it is private and no token is set ({LOGIN})"
    kind = "model" if repo.kind == "model" else "data set"
    return (
        f"there is no folder {Path(repo.name).absolute()}, and {constants.ENDPOINT} has no {kind} {repo.name}, or "
        f"{private}: correct the name"
    )


def _refused(status: int, error: BaseException, repo: Repo) -> str:
    from huggingface_hub import constants

    place = _token_place()
    if status == 401 and place is None:  # what the hub says of names that it does not have, too
        return _not_found(repo)
    if status in (401, 403):
        said = f"the token in {place}" if place else "a request without token"
        return (
            f"{constants.ENDPOINT} refuses {said} for {repo.name} (HTTP {status}): make a token that may read it at "
            f"{constants.ENDPOINT}/settings/tokens and set it ({LOGIN})"
        )
    if status == 404:
        return f"{repo.key} lacks a file that its list of files names: {_short(error)}; is HF_ENDPOINT right?"
    return f"{constants.ENDPOINT} answers HTTP {status} for {repo.name}: try again later. {_beforehand(repo)}"


def _page(repo: Repo) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"


def _token_place() -> str | None:
    """Return where the token in use is kept; None: there is none."""
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
