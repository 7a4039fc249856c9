"""An error of ``huggingface_hub`` as one sentence with its cause and the fix."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from skyrl_megatron.errors import HubError
from skyrl_megatron.hub.names import Repo

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
