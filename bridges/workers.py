"""Running conversions in threads, and telling how far they are.

Threads and not processes: the work is system calls and tensor copies, which release the interpreter lock, and the
mapped input is shared.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TextIO


class Progress:
    """Bytes done, shown as one line with rate and time left. ``stream`` None: silent."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self.total = total
        self.label = label
        self.done = 0
        self._stream = stream
        self._started = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes; safe from any thread."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self._stream and (now - self._shown >= 0.5):
                self._shown = now
                self._show(now)

    @property
    def seconds(self) -> float:
        """Since the start."""
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
    """Cut ``items`` into ``count`` consecutive runs of about equal weight (some may be empty)."""
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
    """Call ``body(worker, item)`` for every item, one thread per run. The first failure stops all and is raised;
    so does an interrupt of the main thread."""
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
    """Return where progress goes: standard error, or nowhere."""
    return None if quiet else sys.stderr
