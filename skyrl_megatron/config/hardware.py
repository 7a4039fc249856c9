"""The machine a configuration is for, told without torch, Ray or a CUDA context."""

from __future__ import annotations

import os
from dataclasses import dataclass

from skyrl_megatron import device


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices that a run may use."""

    gpus_per_node: int
    """GPUs of one node; 0 is a CPU run, where each rank is a process."""
    nodes: int | None = None
    """Nodes; None where that is not known yet."""

    @property
    def is_cpu(self) -> bool:
        """True for a run without GPUs."""
        return self.gpus_per_node == 0

    def __str__(self) -> str:
        if self.is_cpu:
            return f"CPU, {os.cpu_count()} cores here"
        return f"{self.gpus_per_node} GPUs per node" + ("" if self.nodes is None else f", {self.nodes} node(s)")


def local_hardware() -> Hardware:
    """Return this machine as one node; nodes are not known where a Ray cluster is joined (``RAY_ADDRESS``)."""
    return Hardware(device.driver_gpu_count(), None if os.environ.get("RAY_ADDRESS") else 1)
