"""Download files of a hub repository at one commit, in a child process that can be killed.

If several processes request the same files, on one node or on nodes that share the cache, one of them downloads and
the others wait. An interrupted download keeps its files, and a later call downloads the rest.

The child process (:func:`main`) gets its request as JSON in its only argument and prints ``{"folder": …}`` or
``{"problem": …}``. It ends when its standard input is closed, and therefore with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bridges.errors import BridgeError
from bridges.files import read_json
from skyrl_megatron.errors import HubError
from skyrl_megatron.hub.repo_names import Repo, cache, explain, offline, silent

type Say = Callable[[str], None]

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Small files of a model: configuration, tokenizer, chat template, index of the weights."""
WHOLE = (*SMALL, "*.safetensors")
"""All files of a model that a run reads."""
CARD = ("README.md", ".huggingface.yaml")
"""Files of a data set that assign its files to splits."""
IGNORED = {"model": ("*/*", "consolidated*"), "dataset": ()}
"""Subfolders of a model hold other formats, and ``consolidated*`` are the same weights again."""

SAY_EVERY_S = 10.0
ASK_S = 30.0
"""Time limit in seconds without data, for requests for a commit and small files."""
STALL_S = 600.0
"""Time limit in seconds without a new byte, for a download in this or another process."""
_INDEX = "model.safetensors.index.json"


def quiet(line: str) -> None:
    """Ignore a line of progress."""


def resolve(repo: Repo, *, say: Say = quiet, stall_s: float = ASK_S) -> str:
    """Return the commit of ``repo``, and download its small files (of a data set: its card) to the cache.

    In offline mode the cache determines the commit of a branch. Raises HubError.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        commit = cached_commit(repo)
        if commit is None or not cached(repo, commit, _small(repo)):
            raise offline(repo)
        return commit
    watch = _Watch(repo, 0, say, stall_s)
    return download_in_process(repo, repo.revision, _small(repo), IGNORED[repo.kind], watch.stalled).name


def cached_commit(repo: Repo) -> str | None:
    """Return the commit of ``repo`` in the cache, or None. Sends no request to the hub."""
    if repo.commit:
        return repo.commit
    with contextlib.suppress(OSError):
        return (_place(repo) / "refs" / (repo.revision or "main")).read_text().strip()
    return None


def cached(repo: Repo, commit: str, files: Sequence[str]) -> Path | None:
    """Return the folder of ``commit`` if the cache has all its ``files`` (patterns), else None. Sends no request."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo.name,
            repo_type=repo.kind,
            revision=commit,
            allow_patterns=list(files),
            ignore_patterns=list(IGNORED[repo.kind]),
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return None if missing_files(Path(folder), repo, files) else Path(folder)


def fetch(repo: Repo, commit: str, files: Sequence[str], *, say: Say = quiet, stall_s: float = STALL_S) -> Path:
    """Return the folder of ``commit`` with ``files`` (patterns); download missing ones.

    ``say`` gets a line every ten seconds. Raises HubError, also after ``stall_s`` seconds without a new byte.
    """
    from huggingface_hub import constants

    if folder := cached(repo, commit, files):
        return folder
    if constants.HF_HUB_OFFLINE:
        raise offline(repo)
    try:
        total = _size(repo, commit, files)
        with _one_downloader(repo, commit, total, say, stall_s):
            folder = cached(repo, commit, files)  # another process may have downloaded it
            if folder is None:
                watch = _Watch(repo, total, say, stall_s)
                folder = download_in_process(repo, commit, files, IGNORED[repo.kind], watch.stalled)
    except HubError:
        raise
    except Exception as error:  # errors of its HTTP client have no common base class with the others
        raise explain(error, repo) from error
    if problem := missing_files(folder, repo, files):
        raise HubError(f"{repo.name} (commit {commit}) {problem}; choose another repository or revision")
    return folder


def missing_files(folder: Path, repo: Repo, files: Sequence[str]) -> str | None:
    """Return which required file a snapshot lacks, as a message; None if it is complete."""
    if repo.kind == "dataset":
        return None
    if repo.adapter and not (folder / "adapter_config.json").is_file():
        return "has no adapter_config.json: it is not an adapter in PEFT format"
    if not repo.adapter and not (folder / "config.json").is_file():
        return "has no config.json: it is not a model in transformers format"
    if "*.safetensors" not in files:
        return None
    if not any(folder.glob("*.safetensors")):
        return "has no safetensors files: convert its weights first"
    with contextlib.suppress(BridgeError, AttributeError):  # the reader of the weights reports a damaged index
        named = read_json(folder / _INDEX).get("weight_map", {}).values() if (folder / _INDEX).is_file() else ()
        missing = sorted({name for name in named if isinstance(name, str) and not os.path.isfile(folder / name)})
        return f"lacks {missing[0]:.200}, which is in its index" if missing else None
    return None


def _small(repo: Repo) -> tuple[str, ...]:
    return SMALL if repo.kind == "model" else CARD


def _place(repo: Repo) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return cache() / repo_folder_name(repo_id=repo.name, repo_type=repo.kind)


def _size(repo: Repo, commit: str, files: Sequence[str]) -> int:
    """Return the number of bytes of ``files`` that are on the hub but not in the cache."""
    from huggingface_hub import HfApi

    info = HfApi().repo_info(repo.name, repo_type=repo.kind, revision=commit, files_metadata=True, timeout=ASK_S)
    here = _place(repo) / "snapshots" / commit
    total = 0
    for sibling in getattr(info, "siblings", None) or []:
        wanted, ignored = (
            any(fnmatch(sibling.rfilename, pattern) for pattern in patterns)
            for patterns in (files, IGNORED[repo.kind])
        )
        if wanted and not ignored and not (here / sibling.rfilename).exists():
            total += sibling.size or 0
    return total


def _bytes_here(repo: Repo) -> int:
    """Return the number of bytes of ``repo`` in the cache, including unfinished downloads."""
    total = 0
    for blob in (_place(repo) / "blobs").glob("*"):
        with contextlib.suppress(OSError):
            status = blob.stat()
            total += min(status.st_size, status.st_blocks * 512) if blob.suffix == ".incomplete" else status.st_size
    return total


@contextlib.contextmanager
def _one_downloader(repo: Repo, commit: str, total: int, say: Say, stall_s: float) -> Iterator[None]:
    """Hold the lock of a commit's download in this cache.

    While another process holds it, report the progress of that process. Raise HubError after ``stall_s`` seconds
    without a new byte.
    """
    from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

    path = cache() / ".locks" / _place(repo).name / f"{commit}.run.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(repo, total, say, stall_s, "another process downloads it")
    lock: BaseFileLock = FileLock(path, mode=0o664)  # a group may share the cache
    while not lock.is_locked:
        try:
            lock.acquire(timeout=1.0)
        except NotImplementedError:  # a file system without flock
            lock = SoftFileLock(path, mode=0o664)
        except Timeout:
            if watch.stalled():
                raise HubError(
                    f"another process downloads {repo.name} to {cache()} but got no data for {stall_s:.0f} s: end "
                    f"that process, or remove {path} if there is none"
                ) from None
    try:
        yield
    finally:
        lock.release()


class _Watch:
    """Progress of the download of ``repo``: prints a line every SAY_EVERY_S seconds and detects a stall."""

    def __init__(self, repo: Repo, total: int, say: Say, stall_s: float, note: str = "") -> None:
        self._repo, self._total, self._say, self._stall_s, self._note = repo, total, say, stall_s, note
        self._last = self._at_first = _bytes_here(repo)
        self._began = self._moved = self._printed = time.monotonic()
        self._looked = 0.0

    def stalled(self) -> bool:
        """Update the progress, print a line if due, and return whether no byte arrived for ``stall_s`` seconds."""
        now = time.monotonic()
        if now - self._looked < min(1.0, self._stall_s / 4):
            return False
        self._looked = now
        here = _bytes_here(self._repo)
        if here != self._last:
            self._last, self._moved = here, now
        if now - self._printed >= SAY_EVERY_S:
            self._printed = now
            self._say(self._line(here, now))
        return now - self._moved > self._stall_s

    def _line(self, here: int, now: float) -> str:
        done = here - self._at_first
        unit, name = (1e6, "MB") if 0 < (self._total or 0) < 1e8 else (1e9, "GB")
        of = f" of {self._total / unit:.2f}" if self._total else ""
        note = f", {self._note}" if self._note else ""
        rate = done / 1e6 / (now - self._began)
        return f"download of {self._repo.name}: {done / unit:.2f}{of} {name}, {rate:.1f} MB/s{note}"


DATA = ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.arrow", "*.txt", "*.gz", "*.zip", "*.zst", "*.xz", "*.bz2")


def data_folder(
    repo: Repo, subset: str | None, commits: Mapping[str, str], *, say: Say = quiet, stall_s: float = STALL_S
) -> Path:
    """Return the folder of a data set; download missing files.

    ``commits``: ``trainer.hub_commits``. If the card of the repository lists subsets, only the files of ``subset``
    (None: the default one) are downloaded. Raises HubError.
    """
    commit = commits.get(repo.key) or resolve(repo, say=say)
    card = fetch(repo, commit, CARD, say=say)
    return fetch(repo, commit, (*CARD, *(_patterns(card / "README.md", subset) or DATA)), say=say, stall_s=stall_s)


def _patterns(card: Path, subset: str | None) -> list[str]:
    """Return patterns of the files of ``subset``; [] if the card does not list them.

    They include the files of the first subset, from which ``datasets`` infers the format.
    """
    from huggingface_hub import DatasetCard

    if not card.is_file():
        return []
    configs = DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs") or []
    named = {config.get("config_name"): config for config in configs if isinstance(config, dict)}
    wanted = [config for config in configs if config.get("default")] or configs[:1]
    chosen = [named[subset]] if subset in named else named.values() if subset else wanted
    patterns = [[*_paths(config.get("data_files"))] for config in (*configs[:1], *chosen)]
    if not all(patterns) or any("data_dir" in config for config in configs):
        return []
    paths = [path.removeprefix("./") for paths in patterns for path in paths]
    return [*dict.fromkeys([*paths, *(path.replace("**/", "") for path in paths)])]


def _paths(files: Any) -> Iterator[str]:
    """Yield the patterns of ``data_files``, which is one pattern, a list, or one entry per split."""
    if isinstance(files, str):
        yield files
    elif isinstance(files, Mapping):
        yield from _paths(files.get("path"))
    else:
        for each in files or []:
            yield from _paths(each)


POLL_S = 0.2


def download_in_process(
    repo: Repo, revision: str | None, files: Sequence[str], ignored: Sequence[str], stalled: Callable[[], bool]
) -> Path:
    """Download ``files`` (patterns) of ``revision`` in a child process; return the snapshot folder.

    Calls ``stalled`` repeatedly, and kills the process once it returns True. Raises HubError.
    """
    root = str(Path(__file__).parents[2])
    request = {"repo": [repo.kind, repo.name, repo.revision], "revision": revision}
    request |= {"files": [*files], "ignored": [*ignored]}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import {__name__} as child; child.main()", json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"},
    )
    try:
        while True:
            try:
                process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if stalled():
                    raise silent(repo) from None
        assert process.stdout is not None
        answer = json.loads(process.stdout.read() or "{}")
    finally:
        process.kill()
        process.communicate()
    if "folder" not in answer:
        raise HubError(answer.get("problem", f"the download of {repo.name} ended with exit code {process.returncode}"))
    return Path(answer["folder"])


def main() -> None:
    """Run the child process: download, print the result, and exit without waiting for threads."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    request = json.loads(sys.argv[1])
    repo = Repo(*request["repo"])
    try:
        from huggingface_hub import snapshot_download

        answer = {
            "folder": snapshot_download(
                repo.name,
                repo_type=repo.kind,
                revision=request["revision"],
                allow_patterns=request["files"],
                ignore_patterns=request["ignored"],
            )
        }
    except Exception as error:
        answer = {"problem": str(explain(error, repo))}
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)
