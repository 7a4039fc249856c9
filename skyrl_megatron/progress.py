"""What a process is doing and when: lines while it waits, spans of work, and the parts of a run's start.

Clocks of hosts are taken to agree, as they do to milliseconds with NTP.

Processes on the way to a run (batch script, cluster, command, the actor that holds it) hand their marks to the next
one, scripts in ``SKYRL_STARTED``: ``begin@SECONDS,queue@SECONDS,…``, since 1970. Clocks of hosts are taken to agree.
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
"""Longest silence of a command."""

_under_way: list[tuple[str, float]] = []
"""Tasks and when they began, the innermost last; those of the command's main thread."""
_listeners: list[Callable[[str], None]] = []
"""Where lines go: to that of the innermost :func:`heartbeat`."""
_spoken = time.monotonic()


def spoke() -> None:
    """Note that a line was written."""
    global _spoken
    _spoken = time.monotonic()


@contextmanager
def under_way(task: str) -> Iterator[None]:
    """Name what is done inside the block, for as long as it takes."""
    entry = (task, time.monotonic())
    _under_way.append(entry)
    try:
        yield
    finally:
        _under_way.remove(entry)


@contextmanager
def heartbeat(say: Callable[[str], None], quiet_s: float | None = None) -> Iterator[None]:
    """Let a thread say what is under way whenever nothing was said for ``quiet_s`` seconds (:data:`QUIET_S`).

    A block inside another one of this process has no thread of its own: while it lasts, the outer one's thread uses
    its ``say``.
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
    """The thread."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s, self._ended, self._entered = quiet_s, threading.Event(), time.monotonic()
        spoke()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(_spoken + self._quiet_s - time.monotonic(), 0.05)):
            if time.monotonic() - _spoken >= self._quiet_s and _listeners:
                task, began = _under_way[-1] if _under_way else ("start", self._entered)
                spoke()
                _listeners[-1](f"… {task}: {time.monotonic() - began:.0f} s so far")


type Span = tuple[str, str, float, float]

MOST = 8192
"""Spans that are kept while nobody takes any; further ones are lost."""
APART_S = 0.002
"""Pauses that do not part two spans of one name."""
_spans: list[Span] = []
_last: dict[str, int] = {}
"""Of each lane the place of its newest span."""


def record(lane: str, name: str, begin: float, end: float) -> None:
    """Keep a span; one that goes on where the lane's last one ended makes it longer. May be called in any thread."""
    place = _last.get(lane, MOST)
    if place < len(_spans) and (last := _spans[place])[1] == name and 0 <= begin - last[3] < APART_S:
        _spans[place] = (lane, name, last[2], end)
    elif len(_spans) < MOST:
        _last[lane] = len(_spans)
        _spans.append((lane, name, begin, end))


@contextmanager
def span(lane: str, name: str) -> Iterator[None]:
    """Record the block, whether or not it fails."""
    begin = time.time()
    try:
        yield
    finally:
        record(lane, name, begin, time.time())


def timed[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Record every call of ``method`` under its name, on the process's own lane."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with span("", method.__name__):
            return method(*args, **kwargs)

    return call


def take() -> list[Span]:
    """Return what was recorded since the last call, in the order in which it was told."""
    taken = list(_spans)
    _last.clear()
    del _spans[: len(taken)]
    return taken


VARIABLE = "SKYRL_STARTED"
BEGIN = "begin"

_marks: list[tuple[str, float]] = []
"""(part, when it was over) of the run that this process is about to begin; the first one is BEGIN."""


def begin(began: float | None = None) -> None:
    """Note that a command begins. ``began``: ``time.perf_counter()`` then, unless now. What came before it is the part
    ``launch``, where a script has told of it; the script's marks are of the first command in a process."""
    now = time.time() if began is None else time.time() - (time.perf_counter() - began)
    _marks[:] = read(os.environ.pop(VARIABLE, ""))
    _marks.append(("launch" if _marks else BEGIN, now))


def done(part: str) -> None:
    """Note that a part is over. Nothing is noted once the first step was taken, or before :func:`begin`."""
    if _marks:
        _marks.append((part, time.time()))


def passed_on(part: str) -> dict[str, str]:
    """Return the variable for a command that is started when ``part`` is over: what a script told, and this part."""
    told = os.environ.get(VARIABLE)
    return {VARIABLE: f"{told},{part}@{time.time():.3f}"} if told else {}


def handed_on() -> str:
    """Return all marks, as ``SKYRL_STARTED`` holds them."""
    return ",".join(f"{part}@{when:.3f}" for part, when in _marks)


def take_over(marks: str) -> None:
    """Go on with the marks of another process."""
    os.environ.pop(VARIABLE, None)
    _marks[:] = read(marks)


def read(marks: str) -> list[tuple[str, float]]:
    """Return (part, time) of each mark; what is none is left out."""
    found = []
    for mark in marks.split(","):
        part, _, when = mark.partition("@")
        if part and when.replace(".", "", 1).isdigit():
            found.append((part, float(when)))
    return found


def first_step() -> dict[str, float]:
    """Return the metrics of a first step that has just been taken; {} for all others.

    ``timing/to_first_step``: seconds since the run was asked for; ``timing/start/<part>``: those of each part, whose
    sum it is.
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
