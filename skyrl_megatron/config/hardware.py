"""The machine a configuration is for, told without torch, Ray or a CUDA context."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from skyrl_megatron import device
from skyrl_megatron.errors import ConfigError, Problem

_CAP_IPC_LOCK = 14
UNLOCK = (
    "ulimit -l unlimited before Ray starts (memlock in /etc/security/limits.conf), docker run --ulimit memlock=-1; "
    "under SLURM LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK"
)
"""How processes may lock as much memory as they want."""


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
    lockable_bytes: int | None = None
    """What a process may register with the RDMA cards of a node; None where nothing limits it, or it is not known."""
    elsewhere: bool = False
    """Not this machine: described by ``--check=NODESxGPUS``, or a cluster's."""

    @property
    def is_cpu(self) -> bool:
        """True for a run without GPUs."""
        return self.gpus_per_node == 0

    def __str__(self) -> str:
        if self.is_cpu:
            return f"CPU, {os.cpu_count()} cores here"
        return f"{self.gpus_per_node} GPUs per node" + ("" if self.nodes is None else f", {self.nodes} node(s)")


def local_hardware() -> Hardware:
    """Return this machine as one node. A run that joins a cluster asks that (``entrypoints/command.py``)."""
    gpus = device.driver_gpu_count()
    return Hardware(gpus, 1, device.driver_gpu_bytes(), own_memory(), lockable_bytes()) if gpus else Hardware(0, 1)


def rdma_cards(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the names of this machine's RDMA network cards."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def lockable_bytes(
    cards: Path = Path("/sys/class/infiniband"), status: Path = Path("/proc/self/status")
) -> int | None:
    """Return the bytes that this process may register with RDMA cards; None without cards, or where nothing limits it.

    The kernel holds registered host memory against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK
    (drivers/infiniband/core/umem.c). Pinned memory of CUDA is not held against it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not rdma_cards(cards):
        return None
    capabilities = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return None if int(capabilities.split()[1], 16) >> _CAP_IPC_LOCK & 1 else soft


def own_memory() -> int:
    """Return the bytes of this machine's memory, or of the container that this process is in."""
    import psutil

    found: list[int] = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such controller; "max"
            found.append(int(Path(path).read_text()))
    return min(found)


GPUS = {"a100": 81920, "h20": 97871, "h100": 81559, "h200": 143771, "b200": 183359, "b300": 275040}
"""MiB of the parts that ``--gpu`` knows by name, as nvidia-smi reports them."""

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def read_size(option: str, text: str) -> int:
    """Return the bytes that ``text`` names: ``80GB``, ``80GiB``, ``85899345920``, or for ``--gpu`` a GPU.

    Raises ConfigError for anything else, and for less than a GiB.
    """
    known = GPUS if option == "--gpu" else {}
    word = text.strip().lower()
    if word in known:
        return known[word] << 20
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", word)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1 << 30:
        names = f"one of {', '.join(known)}, or " if known else ""
        raise ConfigError([Problem(option, text, f"write {names}a size of at least 1 GiB, such as 80GB or 80GiB")])
    return size
