"""Which device the process computes on and which backend its collectives use: decided here, asked everywhere.

The rest of the package never spells a device or backend name; a structure test enforces it.
"""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def has_cuda() -> bool:
    """True when a CUDA device is usable in this process."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def set_local_device(local_rank: int | None = None) -> torch.device:
    """Bind this process to its CUDA device (``local_rank``, default ``$LOCAL_RANK`` or 0); no-op on CPU."""
    if has_cuda():
        rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return device()


def collective_backend() -> str:
    """The ``torch.distributed`` backend of trainer groups. On CUDA, CPU tensors still travel over gloo."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def default_dtype() -> torch.dtype:
    """bfloat16 on CUDA; float32 on CPU, where tests compare numbers."""
    return torch.bfloat16 if has_cuda() else torch.float32


def synchronize() -> None:
    """Wait for the device's queued work, so that a timer measures it."""
    if has_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Return cached device memory to the driver."""
    if has_cuda():
        torch.cuda.empty_cache()


def peak_memory_bytes() -> int:
    """Peak bytes held by this process: device allocator on CUDA, resident set on CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
