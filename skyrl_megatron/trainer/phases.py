"""Time and memory of each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_process = psutil.Process()


class Phases:
    """``with phases("generate"): …`` adds to ``timings["generate"]`` (seconds) and notes this process's memory."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, self.current = self.current, name
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - began
            self.memory[name] = _process.memory_info().rss / 1e9
            self.current = outer

    def metrics(self) -> dict[str, float]:
        """``timing/<phase>`` in seconds and ``memory/<phase>_trainer_gb``; starts anew."""
        timings = {f"timing/{name}": seconds for name, seconds in self.timings.items()}
        memory = {f"memory/{name}_trainer_gb": gigabytes for name, gigabytes in self.memory.items()}
        self.timings, self.memory = {}, {}
        return timings | memory
