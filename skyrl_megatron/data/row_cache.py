"""What is made of data files once, by all processor cores, and read by many runs: arrays, in a folder of this machine
with a bounded size.

The folder is ``$SKYRL_MEGATRON_HOME/rows`` (default ``~/.cache/skyrl_megatron/rows``)::

    <key>/NAME.safetensors   arrays of an entry; a file with this name is complete, its metadata has a hash of them
    <key>.use                locked by each process that uses the entry; its time is that of the last use

The key is a hash of everything that the arrays depend on, so an entry is never changed, only completed. Locks are the
kernel's and end with their process, also by ``kill -9``. So do the processes that make arrays (:class:`RowProcesses`),
which end with the run.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.data.tokenizer import time_of_run, times_in
from skyrl_megatron.errors import DataError

SUFFIX, USE = ".safetensors", ".use"
LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""What renders and tokenizes rows."""


def default_folder() -> Path:
    """Return the folder of this user on this machine."""
    home = os.environ.get("SKYRL_MEGATRON_HOME", "~/.cache/skyrl_megatron")
    return Path(home).expanduser().absolute() / "rows"


def run_cache(gigabytes: float) -> RowCache | None:
    """Return the cache of a run with ``data.row_cache_gb``."""
    return RowCache(int(gigabytes * 1e9)) if gigabytes else None


class RowCache:
    """The entries of a ``folder`` (None: that of this user), which have up to ``most`` bytes together."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        self.most, self.folder = most, folder or default_folder()

    def entry(self, key: str) -> CacheEntry:
        """Return an entry, which may be empty, and is not removed as long as it is used. Raises OSError if the folder
        cannot be written."""
        private_folder(self.folder)
        lock = _locked(self.folder / f"{key}{USE}", fcntl.LOCK_SH)
        assert lock is not None
        os.utime(lock)
        return CacheEntry(private_folder(self.folder / key), lock)

    @contextmanager
    def kept(self, kind: str, sources: Sequence[Path], **of: Any) -> Iterator[CacheEntry | None]:
        """Yield the entry of :func:`key_of` for the block; None if the folder cannot be written."""
        try:
            entry = self.entry(key_of(kind, sources, **of))
        except OSError:
            yield None
            return
        try:
            yield entry
        finally:
            entry.close()

    def make_room(self, needed: int) -> bool:
        """Return whether ``needed`` more bytes fit, after removing the entries that were used least recently. Entries
        in use stay."""
        return self.free(needed) >= needed

    def free(self, needed: int) -> int:
        """Return how many bytes are free, after removing entries as :meth:`make_room` does."""
        sizes = {folder: _size(folder) for folder in self.folder.iterdir() if folder.is_dir()}
        total = sum(sizes.values()) + needed
        for folder in sorted(sizes, key=_last_use):
            if total <= self.most:
                break
            use = self.folder / f"{folder.name}{USE}"
            try:
                lock = _locked(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except PermissionError:  # another user's
                lock = None
            if lock is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            use.unlink(missing_ok=True)
            os.close(lock)
            total -= sizes[folder]
        return self.most - total + needed


class CacheEntry:
    """The files of one key. ``lock``: the open file that says that it is in use."""

    def __init__(self, folder: Path, lock: int = -1) -> None:
        self.folder, self._lock = folder, lock
        self._whole: dict[str, FileState] = {}
        """State of each file whose hash was found right."""

    def read(self, name: str) -> ArrayFile | None:
        """Open the arrays ``name``; None if there are none. A damaged file is removed. The hash is compared when this
        object first reads a file, and again when the file has changed since then."""
        from safetensors import SafetensorError

        path = self.folder / f"{name}{SUFFIX}"
        try:
            state, opened = state_of(path), ArrayFile(path)
            if self._whole.get(name) == state or opened.is_whole:
                self._whole[name] = state
                return opened
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, KeyError):
            pass  # cut, or no such file at all: made again, like one with another hash
        path.unlink(missing_ok=True)
        return None

    def write(self, name: str, arrays: Mapping[str, np.ndarray], about: Any = None) -> bool:
        """Write arrays [any], and ``about`` as JSON, under a name; return whether the disk took them."""
        from safetensors.numpy import save

        partial = self.folder / f".{name}-{os.getpid()}"
        try:
            metadata = {"about": json.dumps(about), "sha256": _digest(arrays)}
            partial.write_bytes(save(dict(arrays), metadata=metadata))
            partial.replace(self.folder / f"{name}{SUFFIX}")
        except OSError:
            partial.unlink(missing_ok=True)
            return False
        return True

    @property
    def names(self) -> set[str]:
        """The names of all arrays; those of damaged files too."""
        return {path.stem for path in self.folder.glob(f"[!.]*{SUFFIX}")}

    def remove_partial(self) -> None:
        """Remove what writers that were killed left; call it as the only writer."""
        for path in self.folder.glob(".*-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others remove the entry. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class ArrayFile:
    """The arrays of a file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        opened: Any = safe_open  # it has no type hints
        self._file = opened(path, framework="numpy")
        self._metadata: dict[str, str] = self._file.metadata()
        self.about: Any = json.loads(self._metadata["about"])

    @property
    def is_whole(self) -> bool:
        """Whether the arrays are those that were written; reads all of them."""
        return self._metadata["sha256"] == _digest({name: self[name] for name in self._file.keys()})

    def __getitem__(self, name: str) -> np.ndarray:
        array: np.ndarray = self._file.get_tensor(name)
        return array

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the elements [stop - start] of a flat array from ``start`` on, the only ones that are read."""
        array: np.ndarray = self._file.get_slice(name)[start:stop]
        return array


MOST_PROCESSES = 64
_SERVE = f"from {__name__} import serve; serve()"
_PR_SET_PDEATHSIG = 1


class RowProcesses[T, R]:
    """Processes, one for each processor core, that call ``work`` with each of ``tasks``.

    ``work`` and what it belongs to are sent to a new process, which forks the others, so memory does not grow with
    their number. All end when this process does. ``nice``: added to their niceness. Raises RuntimeError if ``work``
    cannot be sent.
    """

    def __init__(self, work: Callable[[T], R], tasks: Sequence[T], *, nice: int = 0) -> None:
        self.count = min(len(os.sched_getaffinity(0)), len(tasks), MOST_PROCESSES)
        alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            env=os.environ | alone,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is the run's to handle
        )
        assert self._process.stdin is not None
        try:
            for part in ((self.count, nice, list(tasks), time_of_run()), work):
                pickle.dump(part, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended, which the missing answer says
        except Exception as error:  # whatever a tokenizer's own code raises
            self.end()
            raise RuntimeError(f"the tokenizer cannot be sent to another process: {error}") from error

    def results(self) -> Iterator[R]:
        """Yield the result of each task, in the order of the tasks. Raises the DataError of the first task that has
        one, and RuntimeError if a process failed."""
        assert self._process.stdout is not None
        try:
            while (answer := pickle.load(self._process.stdout)) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer[0]
        except (EOFError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            raise RuntimeError(f"the processes that tokenize rows ended with code {code}") from error
        finally:
            self.end()

    def end(self) -> None:
        """End the processes, if they have not ended."""
        self._process.kill()
        self._process.wait()


_work: Callable[[Any], Any] | None = None
"""In a process of :class:`RowProcesses`: what it calls."""


def serve() -> None:
    """Be the first process of :class:`RowProcesses`: read the job from the standard input, and answer there."""
    global _work
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        count, nice, tasks, time = pickle.load(sys.stdin.buffer)
        os.nice(nice)
        time_of_run(time)
        _work = pickle.load(sys.stdin.buffer)
        pool = ProcessPoolExecutor(count, get_context("fork"), _end_with, (os.getpid(),))
        results = pool.map(_call, tasks)  # forks, so threads begin after it
        threading.Thread(target=_end_with_the_run, daemon=True).start()
        for result in results:
            answers.write(pickle.dumps((result,)))
            answers.flush()
        pool.shutdown()  # the processor time of its processes becomes that of this one
        pickle.dump(None, answers)
    except DataError as error:
        pickle.dump(error, answers)
    except Exception as error:  # of a tokenizer's own code, or of a worker that was killed
        pickle.dump(RuntimeError(f"{type(error).__name__}: {error}"), answers)
    answers.flush()
    os._exit(0)  # a thread still reads the standard input, and the others end with this process


def _call(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_with_the_run() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


type FileState = tuple[int, int, int]
"""(number of the file on its disk, size in bytes, time of the last change in ns)."""


def state_of(file: Path | int) -> FileState:
    """Return what changes with the content of a file, given by its path or its descriptor."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def key_of(kind: str, sources: Sequence[Path], **of: Any) -> str:
    """Return the key of what the code in the files ``sources`` makes of ``of``, values that JSON can represent."""
    parts = {"kind": kind, "code": _code(tuple(sources)), "of": of}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any, template: str | None) -> str:
    """Return a hash of a tokenizer's content, or of its files, and of the chat template (None: the tokenizer's) with
    the day or time that it writes; "" if neither can be read, as of a script's own class."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:  # what precedes the tokens are settings of its last call
        content = inner.to_str().partition('"added_tokens"')[2].encode()
    else:
        folder = Path(str(getattr(tokenizer, "name_or_path", "")))
        content = b"".join(path.read_bytes() for path in sorted(folder.glob("*")) if path.suffix in _VOCABULARIES)
    if not content:
        return ""
    settings = [
        getattr(tokenizer, name, None) for name in ("chat_template", "special_tokens_map", "split_special_tokens")
    ]
    settings[0] = template or settings[0]
    templates = settings[0].values() if isinstance(settings[0], dict) else [settings[0] or ""]
    settings += [times_in(str(text)) for text in templates]
    text = json.dumps([type(tokenizer).__name__, len(tokenizer), *settings], default=str)
    return hashlib.sha256(content + text.encode()).hexdigest()


_VOCABULARIES = (".json", ".model", ".txt", ".tiktoken", ".py")


@cache
def _code(sources: tuple[Path, ...]) -> list[str]:
    libraries = [f"{name} {version(name)}" for name in LIBRARIES]
    return [*libraries, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources))]


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        hasher.update(np.ascontiguousarray(arrays[name]).data)
    return hasher.hexdigest()


def _locked(path: Path, how: int) -> int | None:
    """Return an open, locked file; None if another process has it, with ``LOCK_NB``."""
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(opened, how)
            if path.exists() and path.stat().st_ino == os.fstat(opened).st_ino:
                return opened
        except BlockingIOError:
            os.close(opened)
            return None
        except FileNotFoundError:
            pass  # removed with its entry since it was opened
        os.close(opened)


def _size(folder: Path) -> int:
    """Return the bytes of an entry; files may be removed meanwhile."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _last_use(folder: Path) -> float:
    try:
        return folder.with_name(f"{folder.name}{USE}").stat().st_mtime
    except FileNotFoundError:
        return 0.0
