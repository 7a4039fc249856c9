"""The machine a configuration is for, told without torch, Ray or a CUDA context."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from skyrl_megatron import device


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices that a run may use."""

    gpus_per_node: int
    """GPUs of one node; 0 is a CPU run, where each rank is a process."""
    nodes: int | None = None
    """Nodes; None where that is not known yet."""
    gpu_bytes: int | None = None
    """Memory of one GPU; None where that is not known."""
    host_bytes: int | None = None
    """Memory of one node; None where that is not known."""

    @property
    def is_cpu(self) -> bool:
        """True for a run without GPUs."""
        return self.gpus_per_node == 0

    def __str__(self) -> str:
        if self.is_cpu:
            return f"CPU, {os.cpu_count()} cores here"
        return f"{self.gpus_per_node} GPUs per node" + ("" if self.nodes is None else f", {self.nodes} node(s)")


def local_hardware() -> Hardware:
    """Return this machine as one node. A run that joins a cluster asks that (``entrypoints/run_hardware.py``)."""
    gpus = device.driver_gpu_count()
    return Hardware(gpus, 1, device.driver_gpu_bytes(), _own_memory()) if gpus else Hardware(0, 1)


def _own_memory() -> int:
    """Return the bytes of this machine's memory, or of the container that this process is in."""
    import psutil

    found: list[int] = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such controller; "max"
            found.append(int(Path(path).read_text()))
    return min(found)
