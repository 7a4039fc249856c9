"""A rank's memory leaves its device and comes back: weights, gradients and the optimizer's state, each on its own.

A storage is emptied in place (``resize_(0)``) and filled again, and no tensor is replaced: everything that looks into
it does so afterwards too — parameters in Megatron's buffers, shards of the distributed optimizer that are views of
parameters, the plan of a weight sync. (Megatron's own ``offload_to_cpu`` replaces ``.data``: a precision-aware
optimizer, whose parameter groups are views of the model's, then updates memory that no model reads.)

Where it goes: weights and optimizer state to host memory (``host_memory.py``), pinned where there is a GPU, taken when
a part first leaves, grown when it has grown, and kept; its size is that of the part, rounded up to 256 MiB. Pinning is
slow, a minute and more for dozens of gigabytes a rank: the optimizer's memory has room for what its first step makes,
and a run lets everything leave once while it starts (``RayPPOTrainer.build_models``). Gradients are zero between steps
and are not kept. What is on the host anyway (a CPU-offloaded optimizer's moments) stays.
Without a GPU the same code empties storages of host memory, but for those that NumPy has looked into, for a checkpoint
or an export: they cannot be emptied, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.runtime.host_memory import HostMemory
from skyrl_megatron.runtime.model.scaled_weights import scaled_buffers

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
"""In the order in which a step needs them."""


@dataclass(slots=True)
class _Emptied:
    """A storage without its memory."""

    storage: torch.UntypedStorage
    nbytes: int
    copies: list[Tensor]
    """Its bytes on the host; empty: it comes back as zeros."""


class Offload:
    """Where the parts of a model in training, or of one that only scores (without an optimizer), are.

    ``chunks``: the model's, in Megatron's DDP where they are trained; of several adapters, those of each.
    """

    def __init__(self, chunks: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        self._chunks, self._optimizers = chunks, optimizers
        self._host = {part: HostMemory() for part in PARTS}
        self._emptied: dict[Part, list[_Emptied]] = {}
        self._arriving: dict[Part, Any] = {}  # CUDA events
        self._stream: Any = None

    def away(self, part: Part) -> bool:
        """Tell whether the part has left."""
        return part in self._emptied

    @property
    def device_bytes(self) -> dict[Part, int]:
        """Bytes that each part holds on the device now."""
        return {
            part: 0 if part in self._emptied else sum(storage.nbytes() for storage in self._storages(part))
            for part in PARTS
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are held for parts, away or not."""
        return sum(memory.nbytes for memory in self._host.values())

    @torch.no_grad()
    def offload(self, parts: Iterable[Part]) -> None:
        """Let parts leave, those that are here; returns when their device memory is free."""
        for part in PARTS:
            if part not in parts or part in self._emptied:
                continue
            self.wait(part)
            self._host[part].rewind()
            emptied = []
            with self._copying():
                for storage in self._storages(part):
                    copies = [] if part == "gradients" else self._host[part].pieces(storage.nbytes())
                    for source, target in _pairs(storage, copies):
                        target.copy_(source, non_blocking=True)
                    emptied.append(_Emptied(storage, storage.nbytes(), copies))
            if part == "optimizer":
                self._host[part].pieces(sum(map(state_to_come, self._optimizers)))
            device.synchronize()
            for each in emptied:
                each.storage.resize_(0)
            self._emptied[part] = emptied
        device.empty_cache()

    @torch.no_grad()
    def onload(self, parts: Iterable[Part]) -> None:
        """Take parts back, those that are away. Copies run beside what the device does next, until :meth:`wait`."""
        for part in PARTS:
            if part not in parts or part not in self._emptied:
                continue
            emptied = self._emptied.pop(part)
            for each in emptied:
                each.storage.resize_(each.nbytes)
            with self._copying():
                for each in emptied:
                    if not each.copies:
                        _bytes(each.storage).zero_()
                    for target, source in _pairs(each.storage, each.copies):
                        target.copy_(source, non_blocking=True)
                if device.has_cuda():
                    self._arriving[part] = torch.cuda.current_stream().record_event()

    def wait(self, *parts: Part) -> None:
        """Let the device's queue go on only when these parts are back whole; they must not be away."""
        for part in parts:
            assert part not in self._emptied, f"{part} are offloaded"
            if (event := self._arriving.pop(part, None)) is not None:
                torch.cuda.current_stream().wait_event(event)

    def _copying(self) -> Any:
        """Return the context of copies: a stream of their own, behind what is queued now."""
        if device.has_cuda() and self._stream is None:
            self._stream = torch.cuda.Stream()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _storages(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of a part on this device, each once."""
        tensors: dict[Part, Callable[[], Iterable[Tensor]]] = {
            "weights": lambda: (parameter for chunk in self._chunks for parameter in _parameters(chunk)),
            "gradients": lambda: (buffer.grad_data for chunk in self._chunks for buffer in _buffers(chunk)),
            "optimizer": lambda: (each for optimizer in self._optimizers for each in optimizer_tensors(optimizer)),
        }
        seen = {tensor.untyped_storage()._cdata for tensor in tensors["weights"]()} if part == "optimizer" else set()
        for tensor in (each for whole in tensors[part]() for each in memory_of(whole)):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.device == device.device() and storage.nbytes():
                seen.add(storage._cdata)
                if storage.resizable():
                    yield storage


def optimizer_tensors(optimizer: Any | None) -> Iterator[Tensor]:
    """Yield what an optimizer holds, on any device, some of it several times: parameters (masters, or views of the
    model's), moments, and those of the optimizers inside Megatron's HybridDeviceOptimizer."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = getattr(part, "optimizer", None)
        if outer is None:
            continue
        for inner in (outer, *getattr(outer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (state[name] for name in sorted(state) if torch.is_tensor(state[name]))
        yield from getattr(outer, "param_to_fp32_param", {}).values()


def state_to_come(optimizer: Any | None) -> int:
    """Return the bytes on this device that Adam's first step makes: moments, and the masters of a precision-aware one
    (Transformer Engine's, ``FusedAdam.initialize_state``)."""
    size = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = getattr(part, "optimizer", None)
        for inner in getattr(outer, "sub_optimizers", None) or ([] if outer is None else [outer]):
            types = getattr(inner, "name_to_dtype_map", {})
            names = ["exp_avg", "exp_avg_sq"] + ["master_param"] * getattr(inner, "master_weights", False)
            for shard in (each for group in inner.param_groups for each in group["params"]):
                if shard.device != device.device() or inner.state.get(shard):
                    continue
                dtypes = {name: types.get(name, shard.dtype) for name in names}
                if getattr(inner, "store_param_remainders", False) and shard.dtype == torch.bfloat16:
                    dtypes["master_param"] = torch.int16
                widths = [2 if dtype == torch.uint8 else dtype.itemsize for dtype in dtypes.values()]  # memory_of
                size += shard.numel() * sum(widths) + (0 if types else 4)  # torch's counts its steps
    return size


def memory_of(tensor: Any) -> list[Tensor]:
    """Return what holds a tensor's bytes: itself, or an FP8 tensor's data and their transpose, which Transformer
    Engine's Adam makes beside them on GPUs before Blackwell (``Float8Quantizer::create_tensor``) and does not read."""
    if not hasattr(tensor, "_transpose"):
        return [tensor]
    return [each for each in (tensor._data, tensor._transpose) if each is not None]


def _parameters(chunk: Any) -> Iterator[Tensor]:
    """Yield the model's, and those that a chunk in Megatron's DDP trains: another adapter may be on the model now."""
    yield from chunk.parameters()
    yield from scaled_buffers(chunk)
    yield from getattr(chunk, "params_with_grad", ())


def _buffers(chunk: Any) -> list[Any]:
    """Return Megatron's gradient buffers of a chunk, which has some when it is in its DDP."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if hasattr(chunk, "expert_parallel_buffers") else []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pairs(storage: torch.UntypedStorage, copies: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (bytes of the storage, the piece of host memory that they go to)."""
    if copies:
        yield from zip(_bytes(storage).split([len(piece) for piece in copies]), copies, strict=True)
