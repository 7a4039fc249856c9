"""Which device the process computes on and which backend its collectives use: decided here, asked everywhere.

The rest of the package never spells a device or backend name; a structure test enforces it. torch is imported by the
functions that need it, so that the configuration can ask for names and count GPUs in milliseconds.
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
"""Name of the GPU collectives, as configurations spell it."""
GLOO = "gloo"
"""Name of the CPU collectives, as configurations spell it."""

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def driver_gpu_count() -> int:
    """Count the GPUs of this machine that this process may use, without loading torch and without a CUDA context.

    Counts the device files ``/dev/nvidiaN`` (a container has only its own), else what the driver lists in
    ``/proc/driver/nvidia/gpus``, else what ``nvidia-smi -L`` says (WSL has neither file); limited by
    ``CUDA_VISIBLE_DEVICES``. 0 on a machine without a driver.
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
    """Return the memory of this machine's smallest GPU as the driver tells it, without torch and without a CUDA
    context; None without GPUs, or where nvidia-smi does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None or not driver_gpu_count():
        return None
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in run.stdout.split() if line.isdigit()]
    return min(sizes) << 20 if run.returncode == 0 and sizes else None


def compiler_environment() -> dict[str, str]:
    """Return what lets this process and its children compile CUDA kernels at their first use, as DeepGEMM and
    FlashInfer do for FP8 weights on Hopper: ``CUDA_HOME`` of the nvcc package in this environment, unless the user
    named another, and this environment's programs (ninja) on ``PATH``. Empty where the package is not installed.
    """
    home = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").is_file():
        return {}
    found = {} if {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() else {"CUDA_HOME": str(home)}
    programs, path = str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)
    return found if programs in path.split(os.pathsep) else found | {"PATH": f"{programs}{os.pathsep}{path}"}


@functools.cache
def has_cuda() -> bool:
    """Return whether a CUDA device is usable in this process."""
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
    """Return bfloat16 on CUDA; float32 on CPU, where tests compare numbers."""
    import torch

    return torch.bfloat16 if has_cuda() else torch.float32


def use_deterministic_kernels() -> None:
    """Let CUDA kernels give the same bits every time, at some cost in speed; torch warns of those that cannot. Before
    anything is computed: cuBLAS and Transformer Engine read their variables once. No-op on CPU, where they do."""
    if not has_cuda():
        return
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def synchronize() -> None:
    """Wait for the device's queued work, so that a timer measures it."""
    if has_cuda():
        import torch

        torch.cuda.synchronize()


def mark() -> Callable[[], None]:
    """Mark where the current stream's queue ends now; the result waits until the device has got there."""
    if not has_cuda():
        return _already
    import torch

    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _already() -> None:
    """Return at once: on CPU nothing is queued."""


def empty_cache() -> None:
    """Return cached device memory to the driver."""
    if has_cuda():
        import torch

        torch.cuda.empty_cache()


def shareable_bytes(nbytes: int, on: torch.device) -> torch.Tensor:
    """Allocate memory that other processes can open, [nbytes] uint8, zeros."""
    import torch

    with fixed_segments():
        return torch.zeros(nbytes, dtype=torch.uint8, device=on)


@contextlib.contextmanager
def fixed_segments() -> Iterator[None]:
    """Take no device memory of torch's expandable segments within the block.

    Another process opens those by ``pidfd_getfd``, which containers without SYS_PTRACE refuse. While the option is off
    torch finds only blocks of other segments (``get_free_block`` in its c10/cuda/CUDACachingAllocator.cpp, made for
    this). The whole text is written, as an option that it leaves out is reset (vllm/device_allocator/alloc_conf.py).
    """
    import torch

    options = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
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
    """Return the peak bytes held by this process: device allocator on CUDA, resident set on CPU."""
    if has_cuda():
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused: that of a device, or of the CPU, which has no error of its own for it."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
