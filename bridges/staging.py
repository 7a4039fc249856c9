"""Atomic output folders, file writers, and conversion in threads with progress.

Threads suffice, because system calls and tensor copies release the GIL, and they share the memory-mapped input.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

import torch
from torch import Tensor

from bridges.errors import BridgeError, OutputError

BLOCK = 64 * 2**20  # bytes of a block in which tensors are cast or made contiguous


@contextmanager
def staged(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary folder next to ``out`` that is renamed to ``out`` at the end, or removed after an error.

    ``needed``: bytes that will be written. Raises :class:`BridgeError` if ``out`` exists, OutputError if the disk has
    too little space or a write fails.
    """
    require_new(out)
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise OutputError(
                f"{out} needs {needed / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB free; make room or choose "
                "another disk"
            )
        staging = parent / f".{out.name}.incomplete-{os.getpid()}"
        staging.mkdir()
    except OSError as error:
        raise _failed(out, error) from error
    try:
        yield staging
        for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
            _sync(folder)
        staging.rename(out)
        _sync(parent)
    except OSError as error:
        raise _failed(out, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_new(out: Path) -> None:
    """Raise :class:`BridgeError` if ``out`` is a file, or a folder that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BridgeError(f"{out} exists; remove it, or name another folder")


def _failed(out: Path, error: OSError) -> BridgeError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room or choose another disk" if full else "check the path and its permissions"
    return OutputError(f"{error.filename or out}: cannot be written ({error.strerror}); {remedy}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileWriter(Protocol):
    """A file being written from front to back."""

    def write(self, *parts: memoryview | bytes) -> None:
        """Append all parts."""

    def finish(self) -> None:
        """Make the file durable and close it."""

    def abandon(self) -> None:
        """Close the file without syncing; may be called twice, and after :meth:`finish`."""


class LocalFile:
    """A :class:`FileWriter` for a new local file. Raises FileExistsError if it exists."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    def write(self, *parts: memoryview | bytes) -> None:
        views = [view for part in parts if len(view := memoryview(part).cast("B"))]
        while views:  # one system call takes at most 2 GiB
            written = os.writev(self._descriptor, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def byte_blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor`` […] in row-major order as ``dtype``, in blocks; a single view if it needs no
    copy."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        yield _bytes(tensor)
        return
    flat = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    row = max(1, flat[0].numel() * max(dtype.itemsize, tensor.dtype.itemsize)) if flat.shape[0] else 1
    for rows in flat.split(max(1, BLOCK // row)):
        yield _bytes(rows.to(dtype).contiguous())


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_all(descriptor: int, data: memoryview, offset: int) -> int:
    """Write all of ``data`` at ``offset`` and return the end offset. One system call writes at most 2 GiB."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    return offset


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a small file. An OSError, also of a full disk, names the file."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class Progress:
    """A progress line with bytes done, rate and time left. ``stream`` None: silent."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self._stream = stream
        self._started = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add ``count`` bytes; thread-safe."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self._stream and (now - self._shown >= 0.5):
                self._shown = now
                self._show(now)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _show(self, now: float) -> None:
        unit, name = (1e9, "GB") if self.total >= 1e8 else (1e6, "MB")
        rate = self.done / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        assert self._stream is not None
        live = self._stream.isatty()
        line = (
            f"{self.label}: {self.done / unit:.2f} of {self.total / unit:.2f} {name}, {rate / unit:.2f} {name}/s, "
            f"{int(left) // 60}:{int(left) % 60:02d} left"
        )
        print(f"\r{line:<78}" if live else line, end="" if live else "\n", file=self._stream, flush=True)

    def finish(self) -> None:
        """Show the final line."""
        if self._stream:
            self._show(time.monotonic())
            if self._stream.isatty():
                print(file=self._stream)


def shares[T](items: Sequence[T], weight: Callable[[T], int], count: int) -> list[Sequence[T]]:
    """Split ``items`` into ``count`` consecutive runs of about equal weight; some may be empty."""
    total = sum(weight(item) for item in items)
    runs: list[Sequence[T]] = []
    start, passed, seen = 0, 0, 0
    for position, item in enumerate(items):
        seen += weight(item)
        while passed < count - 1 and seen * count >= total * (passed + 1):
            runs.append(items[start : position + 1])
            start, passed = position + 1, passed + 1
    runs.append(items[start:])
    return runs + [items[:0]] * (count - len(runs))


def in_threads[T](runs: Sequence[Sequence[T]], body: Callable[[int, T], None]) -> None:
    """Call ``body(worker, item)`` for every item, with one thread per run.

    The first error, or an interrupt of the main thread, stops all threads and is raised.
    """
    stop = threading.Event()

    def work(worker: int) -> None:
        for item in runs[worker]:
            if stop.is_set():
                return
            body(worker, item)

    with ThreadPoolExecutor(max_workers=len(runs), thread_name_prefix="convert") as pool:
        futures = [pool.submit(work, worker) for worker in range(len(runs))]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in done:
            future.result()


def progress_stream(quiet: bool) -> TextIO | None:
    """Return the stream for progress: standard error, or None if ``quiet``."""
    return None if quiet else sys.stderr
