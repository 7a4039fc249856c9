"""Time and memory of each phase of a step, and the lines of those that come before the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from skyrl_megatron import spans, start_times
from skyrl_megatron.progress import under_way

_process = psutil.Process()


class Phases:
    """``with phases("generate"): …`` adds to ``timings["generate"]`` (seconds) and notes this process's memory, and
    what ``held`` says at the end of the phase, which it is given: bytes by whose they are."""

    def __init__(self, held: Callable[[str], dict[str, int]] = lambda phase: {}) -> None:
        self.timings: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self._held, self._began = held, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._began[name] = time.perf_counter()
        try:
            with under_way(name), spans.span("trainer", name):
                yield
                self.memory |= {f"{name}_{whose}": nbytes / 1e9 for whose, nbytes in self._held(name).items()}
        finally:
            del self._began[name]
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - began
            self.memory[f"{name}_trainer"] = _process.memory_info().rss / 1e9

    def so_far(self) -> dict[str, float]:
        """Return :attr:`timings` with the seconds of phases that are under way."""
        now = time.perf_counter()
        return self.timings | {name: self.timings.get(name, 0.0) + now - began for name, began in self._began.items()}

    def metrics(self) -> dict[str, float]:
        """Return ``timing/<phase>`` in seconds, ``memory/<phase>_trainer_gb`` and ``memory/<phase>_<role>_gb`` of
        roles that take turns, and start anew."""
        timings = {f"timing/{name}": seconds for name, seconds in self.timings.items()}
        memory = {f"memory/{name}_gb": gigabytes for name, gigabytes in self.memory.items()}
        self.timings, self.memory = {}, {}
        return timings | memory


class StartUp:
    """One line for each phase on the way to the first step, with its seconds. ``began``: of ``time.perf_counter``."""

    def __init__(self, say: Callable[[str], None], began: float | None = None) -> None:
        self.say, self._last = say, time.perf_counter() if began is None else began

    def done(self, text: str) -> None:
        """Say ``text`` and the seconds since the line before; what stands before its colon is a part of the start."""
        start_times.done(text.partition(":")[0])
        now = time.perf_counter()
        self.say(f"{text:<74}{now - self._last:6.1f} s")
        self._last = now
