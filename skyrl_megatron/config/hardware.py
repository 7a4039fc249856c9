"""Detect the machine of a run without torch, Ray or a CUDA context."""

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
"""How to remove the limit of locked memory."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices that a run may use."""

    gpus_per_node: int
    """GPUs per node. 0: a CPU run, in which each rank is a process."""
    nodes: int | None = None
    """Number of nodes; None: unknown."""
    gpu_bytes: int | None = None
    """Memory of one GPU in bytes; None: unknown."""
    host_bytes: int | None = None
    """Memory of one node in bytes; None: unknown."""
    lockable_bytes: int | None = None
    """Bytes that a process may register with RDMA cards; None: no limit, or unknown."""
    gpu: str | None = None
    """The type of its GPUs, a key of :data:`GPU_TYPES`; None: unknown, or GPUs differ."""
    elsewhere: bool = False
    """True for other machines than this one: those of ``--check=NODESxGPUS``, or of a cluster."""

    uneven: tuple[int, ...] = ()
    """GPUs of each node that has any, if nodes differ."""

    @property
    def node_gpus(self) -> tuple[int, ...]:
        """GPUs of each node; empty if the number of nodes is unknown."""
        return self.uneven or (self.gpus_per_node,) * (self.nodes or 0)

    @property
    def is_cpu(self) -> bool:
        """True for a run without GPUs."""
        return self.gpus_per_node == 0

    def __str__(self) -> str:
        if self.is_cpu:
            return f"CPU, {os.cpu_count()} cores"
        return f"{self.gpus_per_node} GPUs per node" + ("" if self.nodes is None else f", {self.nodes} node(s)")


def local_hardware() -> Hardware:
    """Return this machine as one node. A run in a cluster uses ``cluster_hardware`` of ``checks.py``."""
    gpus = device.driver_gpu_count()
    if not gpus:
        return Hardware(0, 1)
    kind = gpu_type(device.driver_gpu_name() or "")
    return Hardware(gpus, 1, device.driver_gpu_bytes(), own_memory(), lockable_bytes(), kind)


def rdma_cards(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the names of this machine's RDMA network cards."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def lockable_bytes(
    cards: Path = Path("/sys/class/infiniband"), status: Path = Path("/proc/self/status")
) -> int | None:
    """Return the bytes that this process may register with RDMA cards; None without cards or without a limit.

    The kernel counts registered host memory against RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK
    (drivers/infiniband/core/umem.c). CUDA's pinned memory does not count.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not rdma_cards(cards):
        return None
    capabilities = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return None if int(capabilities.split()[1], 16) >> _CAP_IPC_LOCK & 1 else soft


def own_memory() -> int:
    """Return the memory of this machine, or of the container of this process, in bytes."""
    import psutil

    # A container may use less than its machine has, and says so in one of two files (cgroups 2 and 1).
    sizes: list[int] = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such controller; "max"
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


@dataclass(frozen=True, slots=True)
class GpuType:
    """Published peaks of one GPU in a server with eight of them. Bytes per second are of one direction."""

    flops: float
    """Dense bf16 FLOP/s."""
    memory: float
    """Bytes/s of its memory."""
    nvlink: float
    """Bytes/s to the GPUs of its node."""
    network: float
    """Bytes/s to other nodes: one network card per GPU, 400 Gbit/s in servers of Hopper."""
    host: float
    """Bytes/s to host memory."""
    fp8: float | None = None
    """Dense 8-bit FLOP/s; None: no such units."""
    fp32: float = 67e12
    """FLOP/s of fp32 without tensor cores."""
    mib: int | None = None
    """Memory in MiB, as nvidia-smi reports it; None: ``--gpu`` does not accept the name."""
    linked: int = 1
    """GPUs that NVLink connects, if those are more than a node's."""


GPU_TYPES = {
    "A100": GpuType(312e12, 2.039e12, 300e9, 25e9, 32e9, None, 19.5e12, 81920),
    "H20": GpuType(148e12, 4.0e12, 450e9, 50e9, 64e9, 296e12, 44e12, 97871),
    "H100": GpuType(989.4e12, 3.35e12, 450e9, 50e9, 64e9, 1978.9e12, 67e12, 81559),
    "H100 PCIe": GpuType(756.5e12, 2.0e12, 300e9, 25e9, 64e9, 1513e12, 51e12),
    "H100 NVL": GpuType(835.5e12, 3.9e12, 300e9, 50e9, 64e9, 1671e12, 60e12),
    "H200": GpuType(989.4e12, 4.8e12, 450e9, 50e9, 64e9, 1978.9e12, 67e12, 143771),
    "H200 NVL": GpuType(835.5e12, 4.8e12, 450e9, 50e9, 64e9, 1671e12, 60e12),
    "B200": GpuType(2250e12, 7.7e12, 900e9, 50e9, 64e9, 4500e12, 75e12, 183359),
    "B300": GpuType(2250e12, 8.0e12, 900e9, 100e9, 128e9, 4500e12, 75e12, 275040),
    "GB200": GpuType(2450e12, 8.0e12, 900e9, 50e9, 225e9, 4900e12, 80e12, 189471, linked=72),
    "GB300": GpuType(2450e12, 8.0e12, 900e9, 100e9, 225e9, 4900e12, 80e12, linked=72),
    "L40S": GpuType(362e12, 0.864e12, 32e9, 25e9, 32e9, 733e12, 91.6e12),
}
"""Peaks from the vendors' data sheets, for SXM parts unless the name says otherwise. PCIe and NVL parts have lower
clocks or fewer cores."""

GPUS = {name.lower(): kind.mib for name, kind in GPU_TYPES.items() if kind.mib is not None}
"""GPU names that ``--gpu`` accepts → memory in MiB."""


def gpu_type(name: str) -> str | None:
    """Return the longest key of :data:`GPU_TYPES` that occurs in a device's name, by torch or nvidia-smi; None if
    none does."""
    return max((key for key in GPU_TYPES if key in name), key=len, default=None)


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def read_size(option: str, text: str) -> int:
    """Return the bytes that ``text`` stands for: ``80GB``, ``80GiB``, ``85899345920``, or, for ``--gpu``, a GPU's
    name.

    Raises ConfigError for other text, and for less than 1 GiB.
    """
    gpus = GPUS if option == "--gpu" else {}
    word = text.strip().lower()
    if word in gpus:
        return gpus[word] << 20
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", word)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1 << 30:
        names = f"one of {', '.join(gpus)}, or " if gpus else ""
        raise ConfigError([Problem(option, text, f"write {names}a size of at least 1 GiB, such as 80GB or 80GiB")])
    return size
