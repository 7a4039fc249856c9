"""A saved stop before the host runs out of memory: the kernel would kill a process, and the run with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import psutil

from skyrl_megatron.config.hardware import own_memory
from skyrl_megatron.errors import HostMemoryError
from skyrl_megatron.trainer.recorders import RecordedRun, RunRecorder

FORECAST_STEPS = 8
"""Steps over which growth is measured."""
AHEAD = 2
"""Further steps that must fit."""
RESERVE_BYTES = 256 << 20
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


def available_bytes() -> int:
    """Return the memory that processes of this host can still allocate without swapping: the smaller of the kernel's
    number and what the container's limit leaves."""
    return min(int(psutil.virtual_memory().available), own_memory() - _used_bytes())


def _used_bytes() -> int:
    """Return the memory that counts against the container's limit, without the inactive page cache."""
    for folder, name, inactive in zip(
        _CGROUPS, ("memory.current", "memory.usage_in_bytes"), ("inactive_file", "total_inactive_file"), strict=True
    ):
        if (folder / name).is_file():
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int((folder / name).read_text()) - int(fields.get(inactive, 0))
    return 0


class MemoryForecast:
    """Predicts from the last steps whether the host runs out of memory. ``available``: returns the free bytes."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self.available = available
        self._seen: deque[int] = deque(maxlen=FORECAST_STEPS)

    def check(self) -> None:
        """Raise HostMemoryError if free memory shrinks from step to step and :data:`AHEAD` more steps would use it
        up. Called once a step."""
        left = self.available()
        self._seen.append(left)
        if len(self._seen) < FORECAST_STEPS:
            return
        seen, half = list(self._seen), FORECAST_STEPS // 2
        growth = (min(seen[:half]) - min(seen[half:])) / half  # minima: memory that is freed again is no growth
        if growth > 0 and left - AHEAD * growth < RESERVE_BYTES:
            raise HostMemoryError(
                f"memory of this host: {left / 2**30:.2f} GiB are left, and each step takes {growth / 2**30:.2f} GiB "
                f"more: the run stops before the kernel kills a process. {_largest()}. Give the host more memory, "
                "sample fewer requests at a time, or find what grows; the same command continues the run"
            )


class MemoryRecorder(RunRecorder):
    """Ends the run, with a checkpoint, before a step that the host's memory would not outlast."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        self.forecast = MemoryForecast()

    def before_step(self) -> None:
        self.forecast.check()


def _largest() -> str:
    """Name the processes that use most memory."""
    used = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if memory := process.info["memory_info"]:
            used.append((memory.rss, f"{process.info['name']} ({process.info['pid']})"))
    most = ", ".join(f"{name} {nbytes / 2**30:.1f} GiB" for nbytes, name in sorted(used, reverse=True)[:3])
    return f"Largest processes: {most}"
