"""Whether this host's memory lasts: a run that would fill it ends by itself, saved, before the kernel ends one of its
processes. Other hosts have Ray's own watch, which ends a rank and names the reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import psutil

from skyrl_megatron.config.hardware import own_memory
from skyrl_megatron.errors import MemoryAheadError

STEPS = 8
"""Steps over which growth is measured."""
AHEAD = 2
"""Further steps that must fit."""
RESERVE_BYTES = 256 << 20
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


def available_bytes() -> int:
    """Return what processes here can still take without swapping, by the kernel and by the limit of the container."""
    return min(int(psutil.virtual_memory().available), own_memory() - _used_bytes())


def _used_bytes() -> int:
    """Return what counts against the container's limit, without the part of files that is dropped first."""
    for folder, name, inactive in zip(
        _CGROUPS, ("memory.current", "memory.usage_in_bytes"), ("inactive_file", "total_inactive_file"), strict=True
    ):
        if (folder / name).is_file():
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int((folder / name).read_text()) - int(fields.get(inactive, 0))
    return 0


class MemoryAhead:
    """Looks once a step. ``available``: where the number comes from."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self.available = available
        self._seen: deque[int] = deque(maxlen=STEPS)

    def look(self) -> None:
        """Raise MemoryAheadError when memory shrinks from step to step and :data:`AHEAD` more would use it up."""
        left = self.available()
        self._seen.append(left)
        if len(self._seen) < STEPS:
            return
        seen, half = list(self._seen), STEPS // 2
        grows = (min(seen[:half]) - min(seen[half:])) / half  # lows: what comes and goes again is no growth
        if grows > 0 and left - AHEAD * grows < RESERVE_BYTES:
            raise MemoryAheadError(
                f"memory of this host: {left / 2**30:.2f} GiB are left, and each step takes {grows / 2**30:.2f} GiB "
                f"more, so that the kernel would soon end a process: the run ends here. {_largest()}. Give it more "
                "memory, fewer samples in flight, or find what grows; the same command continues"
            )


def _largest() -> str:
    """Name the processes that hold most."""
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if memory := process.info["memory_info"]:
            found.append((memory.rss, f"{process.info['name']} ({process.info['pid']})"))
    most = ", ".join(f"{name} {nbytes / 2**30:.1f} GiB" for nbytes, name in sorted(found, reverse=True)[:3])
    return f"Largest processes: {most}"
