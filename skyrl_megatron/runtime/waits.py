"""How long this process waited for other ranks: what is left of a call's time is its own, in which a straggler shows.

Ranks of a step all take equally long, because each waits for the slowest one in every collective. Every wait of
``torch.distributed`` on the host goes through ``Work.wait`` (``torch/distributed/distributed_c10d.py``), which on CPU
returns when the collective is over. On GPUs it returns at once and the stream waits, so that nothing is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_waited = 0.0
_counting = False


def count() -> None:
    """Count from now on. Does nothing when it is counted already."""
    global _counting
    if _counting:
        return
    _counting = True
    from torch._C._distributed_c10d import Work

    wait: Callable[..., Any] = Work.wait

    def counted(self: Work, *args: Any, **kwargs: Any) -> Any:
        global _waited
        began = time.perf_counter()
        try:
            return wait(self, *args, **kwargs)
        finally:
            _waited += time.perf_counter() - began

    Work.wait = counted  # type: ignore[method-assign]


def own_seconds() -> float:
    """Return a clock of this process that stands still while it waits for others; differences count alone."""
    return time.perf_counter() - _waited
