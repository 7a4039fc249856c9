"""Named places in a save where a fault test may end the process. Nothing happens there in a run.

``before data`` · ``between shards`` · ``before manifest`` · ``before rename`` · ``before pointer`` · ``during prune``
"""

from __future__ import annotations

from collections.abc import Callable

on_reached: Callable[[str], None] | None = None
"""Called with the name of each place as it is reached."""


def reached(point: str) -> None:
    """Tell that ``point`` was reached."""
    if on_reached is not None:
        on_reached(point)
