"""Who worked when: (lane, name, begin, end) of this process, in seconds since 1970, kept until somebody takes them.

Clocks of hosts are taken to agree, as they do to milliseconds with NTP.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
