"""Progress of a process: heartbeat lines while it waits, timed spans of work, and start-up marks of a run.

The processes that lead to a run (batch script, cluster, command, and the actor that runs it) pass their start-up marks
to the next one. Scripts pass them in ``SKYRL_STARTED`` as ``begin@SECONDS,queue@SECONDS,…``, in seconds since 1970.
The clocks of hosts are assumed to agree; with NTP they do within milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 10.0
"""Longest time in seconds without a line of output of a command."""

_tasks: list[tuple[str, float]] = []
"""(task, start time) of the main thread of the command, the innermost last."""
_listeners: list[Callable[[str], None]] = []
"""Output functions of the nested :func:`heartbeat` blocks. Lines go to the innermost one."""
_last_output = time.monotonic()


def note_output() -> None:
    """Note that a line was printed."""
    global _last_output
    _last_output = time.monotonic()


@contextmanager
def current_task(task: str) -> Iterator[None]:
    """Name the task of the block for heartbeat lines."""
    entry = (task, time.monotonic())
    _tasks.append(entry)
    try:
        yield
    finally:
        _tasks.remove(entry)


@contextmanager
def heartbeat(say: Callable[[str], None], quiet_s: float | None = None) -> Iterator[None]:
    """Let a thread print the current task after ``quiet_s`` seconds without output (default :data:`QUIET_S`).

    A nested block starts no second thread: while it lasts, the thread of the outer block uses its ``say``.
    """
    _listeners.append(say)
    outermost = len(_listeners) == 1
    beat = _Beat(QUIET_S if quiet_s is None else quiet_s) if outermost else None
    try:
        yield
    finally:
        _listeners.remove(say)
        if beat is not None:
            beat.end()


class _Beat:
    """The heartbeat thread."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._ended, self._entered = quiet_s, threading.Event(), time.monotonic()
        note_output()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(_last_output + self._quiet_s - time.monotonic(), 0.05)):
            if time.monotonic() - _last_output >= self._quiet_s and _listeners:
                task, began = _tasks[-1] if _tasks else ("start", self._entered)
                note_output()
                _listeners[-1](f"… {task}: {time.monotonic() - began:.0f} s so far")


type Span = tuple[str, str, float, float]

MAX_SPANS = 8192
"""Maximum number of spans until :func:`take`; further spans are dropped."""
MERGE_S = 0.002
"""Longest pause in seconds between two spans of one name that are merged."""
_spans: list[Span] = []
_last: dict[str, int] = {}
"""Lane → index of its newest span."""


def record(lane: str, name: str, begin: float, end: float) -> None:
    """Record a span, or extend the lane's last span if it has the same name and ended just before. Thread-safe."""
    place = _last.get(lane, MAX_SPANS)
    if place < len(_spans) and (last := _spans[place])[1] == name and 0 <= begin - last[3] < MERGE_S:
        _spans[place] = (lane, name, last[2], end)
    elif len(_spans) < MAX_SPANS:
        _last[lane] = len(_spans)
        _spans.append((lane, name, begin, end))


@contextmanager
def span(lane: str, name: str) -> Iterator[None]:
    """Record the block as a span, also if it raises."""
    begin = time.time()
    try:
        yield
    finally:
        record(lane, name, begin, time.time())


def timed[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Record every call of ``method`` as a span with its name, on the lane of the process."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span("", method.__name__):
            return method(*args, **kwargs)

    return call


def take() -> list[Span]:
    """Return the spans recorded since the last call, in their order, and remove them."""
    taken = list(_spans)
    _last.clear()
    del _spans[: len(taken)]
    return taken


VARIABLE = "SKYRL_STARTED"
BEGIN = "begin"

_marks: list[tuple[str, float]] = []
"""(part, end time) of each finished part of the start of this run. The first part is BEGIN."""


def begin(began: float | None = None) -> None:
    """Mark the begin of a command.

    ``began``: its ``time.perf_counter()``, default now. If a script passed marks, the time before this call is the
    part ``launch``. The marks of a script count for the first command of a process only.
    """
    now = time.time() if began is None else time.time() - (time.perf_counter() - began)
    _marks[:] = read(os.environ.pop(VARIABLE, ""))
    _marks.append(("launch" if _marks else BEGIN, now))


def done(part: str) -> None:
    """Mark the end of a part. No-op before :func:`begin` and after the first step."""
    if _marks:
        _marks.append((part, time.time()))


def marks_for_command(part: str) -> dict[str, str]:
    """Return the environment variable for a command that starts at the end of ``part``: earlier marks and this one."""
    marks = os.environ.get(VARIABLE)
    return {VARIABLE: f"{marks},{part}@{time.time():.3f}"} if marks else {}


def format_marks() -> str:
    """Return all marks in the format of ``SKYRL_STARTED``."""
    return ",".join(f"{part}@{when:.3f}" for part, when in _marks)


def restore_marks(marks: str) -> None:
    """Continue the marks of another process."""
    os.environ.pop(VARIABLE, None)
    _marks[:] = read(marks)


def read(marks: str) -> list[tuple[str, float]]:
    """Return (part, time) of each mark; skip malformed ones."""
    found = []
    for mark in marks.split(","):
        part, _, when = mark.partition("@")
        if part and when.replace(".", "", 1).isdigit():
            found.append((part, float(when)))
    return found


def first_step() -> dict[str, float]:
    """Return the start-up metrics after the first step; {} after all other steps.

    ``timing/to_first_step`` is the time from the start of the run to the end of the first step, in seconds.
    ``timing/start/<part>`` is the time of each part; the parts add up to it.
    """
    done("step")
    marks = list(_marks)
    _marks.clear()
    if not marks:
        return {}
    metrics = {"timing/to_first_step": marks[-1][1] - marks[0][1]}
    for (_, began), (part, ended) in itertools.pairwise(marks):
        name = f"timing/start/{part.replace('-', '_').replace(' ', '_')}"
        metrics[name] = metrics.get(name, 0.0) + ended - began
    return metrics
