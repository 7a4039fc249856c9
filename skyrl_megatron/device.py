"""The device of the process and the backend of its collectives.

No other module of the package contains a device or backend name; a structure test enforces this. Functions import
torch only when they need it, so that the configuration can use the names and count GPUs in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NCCL = "nccl"
"""Configuration value of the GPU backend."""
GLOO = "gloo"
"""Configuration value of the CPU backend."""

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the options of torch's allocator, newest name first."""

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def driver_gpu_count() -> int:
    """Count the GPUs of this machine that this process may use, without loading torch and without a CUDA context.

    Counts the device files ``/dev/nvidiaN`` (a container has only those of its GPUs), else the entries of
    ``/proc/driver/nvidia/gpus``, else the lines of ``nvidia-smi -L`` (WSL has neither file). The result is limited by
    ``CUDA_VISIBLE_DEVICES``. It is 0 on a machine without a driver.
    """
    present = sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if not present and _DRIVER_GPUS.is_dir():
        present = sum(1 for _ in _DRIVER_GPUS.iterdir())
    if not present and (command := shutil.which("nvidia-smi")):
        present = _listed_by(command)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [name for name in visible.split(",") if name.strip() not in {"", "-1", "NoDevFiles"}]
    return min(present, len(named))


def _listed_by(nvidia_smi: str) -> int:
    try:
        run = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(1 for line in run.stdout.splitlines() if line.startswith("GPU ")) if run.returncode == 0 else 0


def driver_gpu_bytes() -> int | None:
    """Return the memory in bytes of this machine's smallest GPU, without torch and without a CUDA context.

    None if there is no GPU or nvidia-smi fails.
    """
    sizes = [int(line) for line in _of_driver("memory.total") if line.isdigit()]
    return min(sizes) << 20 if sizes else None


def driver_gpu_name() -> str | None:
    """Return the name of this machine's GPUs. None if they differ, if there are none, or if nvidia-smi fails."""
    names = set(_of_driver("name"))
    return names.pop() if len(names) == 1 else None


def _of_driver(field: str) -> list[str]:
    """Return a field of nvidia-smi for each GPU; [] if there is no GPU or nvidia-smi fails."""
    command = shutil.which("nvidia-smi")
    if command is None or not driver_gpu_count():
        return []
    asked = [command, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in run.stdout.splitlines()] if run.returncode == 0 else []


def compiler_environment() -> dict[str, str]:
    """Return the environment variables for just-in-time compilation of CUDA kernels by this process and its children.

    DeepGEMM and FlashInfer compile kernels for FP8 weights on Hopper. The variables are ``CUDA_HOME`` of the nvcc
    package in this environment, unless the user has set one, and ``PATH`` with this environment's programs (ninja). {}
    if the package is not installed.
    """
    home = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").is_file():
        return {}
    compiler = {} if {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() else {"CUDA_HOME": str(home)}
    programs, path = str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)
    return compiler if programs in path.split(os.pathsep) else compiler | {"PATH": f"{programs}{os.pathsep}{path}"}


@functools.cache
def has_cuda() -> bool:
    """Return whether this process can use a CUDA device."""
    import torch

    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process: the current CUDA device, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def set_local_device(local_rank: int | None = None) -> torch.device:
    """Bind this process to its CUDA device (``local_rank``, default ``$LOCAL_RANK`` or 0); no-op on CPU."""
    if has_cuda():
        import torch

        rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return device()


def collective_backend() -> str:
    """Return the ``torch.distributed`` backend of trainer groups. On CUDA, CPU tensors still travel over gloo."""
    return f"cpu:{GLOO},cuda:{NCCL}" if has_cuda() else GLOO


def default_dtype() -> torch.dtype:
    """Return bfloat16 on CUDA, and float32 on CPU, where tests compare numbers."""
    import torch

    return torch.bfloat16 if has_cuda() else torch.float32


def use_deterministic_kernels() -> None:
    """Make CUDA kernels deterministic, at some cost in speed. torch warns of operations without such a kernel.

    Call it before any computation: cuBLAS and Transformer Engine read their variables once. No-op on CPU, where
    kernels are deterministic.
    """
    if not has_cuda():
        return
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def synchronize() -> None:
    """Wait for the work queued on the device, so that a timer includes it."""
    if has_cuda():
        import torch

        torch.cuda.synchronize()


def mark() -> Callable[[], None]:
    """Record an event on the current stream. The returned function waits until the device has reached it."""
    if not has_cuda():
        return _already
    import torch

    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _already() -> None:
    """Return at once: the CPU has no queue."""


def empty_cache() -> None:
    """Return cached device memory to the driver."""
    if has_cuda():
        import torch

        torch.cuda.empty_cache()


def shareable_bytes(nbytes: int, on: torch.device) -> torch.Tensor:
    """Allocate zeros that other processes can map, [nbytes] uint8."""
    import torch

    with fixed_segments():
        return torch.zeros(nbytes, dtype=torch.uint8, device=on)


@contextlib.contextmanager
def fixed_segments() -> Iterator[None]:
    """Disable torch's expandable segments for allocations within the block.

    Another process maps such segments by ``pidfd_getfd``, which containers without SYS_PTRACE refuse. While the option
    is off, torch uses only blocks of other segments (``get_free_block`` in c10/cuda/CUDACachingAllocator.cpp). All
    options are set again, because a missing one would be reset (vllm/device_allocator/alloc_conf.py).
    """
    import torch

    options = next(filter(None, map(os.environ.get, ALLOCATOR_OPTIONS)), "")
    fixed = re.sub(r"(?i)(expandable_segments\s*:\s*)(true|1)\b", r"\1False", options)
    if fixed == options:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(fixed)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(options)


def peak_memory_bytes() -> int:
    """Return the peak memory of this process in bytes: of the device allocator on CUDA, the resident set on CPU."""
    if has_cuda():
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means out of memory, on a device or on the CPU (which raises a plain RuntimeError)."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
