"""When a run was asked for and what was done since: the time to its first step, in parts that follow one another.

Processes on the way to a run (batch script, cluster, command, the actor that holds it) hand their marks to the next
one, scripts in ``SKYRL_STARTED``: ``begin@SECONDS,queue@SECONDS,…``, since 1970. Clocks of hosts are taken to agree.
"""

from __future__ import annotations

import itertools
import os
import time

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
