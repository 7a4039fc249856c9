"""Sleep mode of vLLM's engines on CPU, which it lacks: memory of weights and KV cache goes back to the system.

On GPUs vLLM frees the pages of its own allocator and keeps the addresses (``device_allocator/cumem.py``). Here a
storage is emptied in place and filled again, which keeps every tensor that looks into it. What oneDNN and the CPU
kernels have packed is a copy of their own, which is dropped: a weight update packs it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of what sleeps and wakes."""


def sleep_on_cpu() -> None:
    """Let engines on CPU sleep and wake as those on GPUs do."""
    CpuPlatform.is_sleep_mode_available = lambda self: True
    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _sleep(worker: Any, level: int = 1) -> None:
    """Free the KV cache, and on level 2 the weights; buffers stay, as no update brings them. Level 1 keeps weights
    where vLLM moves them on GPUs: in host memory."""
    asleep: dict[str, list[tuple[torch.UntypedStorage, int]]] = worker.__dict__.setdefault("skyrl_asleep", {})
    parts = {KV_CACHE: _tensors(worker.model_runner.kv_caches)}
    if level > 1:
        model: nn.Module = worker.model_runner.model
        parts[WEIGHTS] = _weights(model, worker.model_config.sleep_preserve_parameter_names)
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = _asleep  # type: ignore[assignment]
    for part, tensors in parts.items():
        if part not in asleep:
            asleep[part] = [(storage, storage.nbytes()) for storage in _storages(tensors)]
            for storage, _ in asleep[part]:
                storage.resize_(0)
    _give_back()


def _wake_up(worker: Any, tags: Sequence[str] | None = None) -> None:
    """Take the memory back: the KV cache as zeros, weights as the next update makes them."""
    asleep = worker.__dict__.get("skyrl_asleep", {})
    for part in tags or list(asleep):
        for storage, nbytes in asleep.pop(part, ()):
            storage.resize_(nbytes)
            if part == KV_CACHE:
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _asleep(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise RuntimeError("the engine's weights sleep: a weight update wakes them")


def _weights(model: nn.Module, kept: Sequence[str]) -> Iterator[Tensor]:
    """Yield the parameters, but for those whose names match a pattern of ``sleep_preserve_parameter_names``."""
    for name, parameter in model.named_parameters():
        if not any(fnmatch(name, pattern) for pattern in kept):
            yield parameter


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists of lists: some caches are several tensors."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for each in nested:
            yield from _tensors(each)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind tensors, each once, that can be emptied."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield storage


def _give_back() -> None:
    """Let tcmalloc, or the C library, return free pages to the system: each keeps them for the next allocation."""
    library = ctypes.CDLL(None)
    if hasattr(library, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc is preloaded
        library.MallocExtension_ReleaseFreeMemory()
    library.malloc_trim(0)
