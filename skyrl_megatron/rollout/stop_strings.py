"""Where a turn ends that a stop string ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def stop_strings(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings of a request."""
    stop = sampling.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(text up to the end of the first stop string, whether there was one). The last token may reach beyond it."""
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
