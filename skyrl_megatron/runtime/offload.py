"""Move parameters, gradients and optimizer states to host memory and back, and copy weights between roles.

:class:`Offload` frees a storage in place (``resize_(0)``) and refills it later. It replaces no tensor, so all views
stay valid: parameters in Megatron's buffers, shards of the distributed optimizer, the plan of a weight sync.
(Megatron's own ``offload_to_cpu`` replaces ``.data``. A precision-aware optimizer, whose parameter groups are views of
the model's parameters, then updates memory that no model reads.)

Weights and optimizer states go to :class:`HostMemory`, which is pinned on a GPU machine. It is allocated at the first
offload and kept, in blocks of 256 MiB: torch's pinned allocator rounds each request up to a power of two, so one
request for 40 GB would take 64 GB. Pinning dozens of gigabytes takes more than a minute per rank. The optimizer's
memory therefore includes the state that its first step allocates, and a run offloads everything once at its start
(``RayPPOTrainer.build_models``). Gradients are zero between steps and are not copied. State that is on the host
already (moments of a CPU-offloaded optimizer) is not moved.
Copies run on their own stream: back to the device while the model computes; of the optimizer to the host from the end
of a rank's last step (:meth:`Offload.start`) until other processes need the memory.
Without a GPU the same code frees host memory, except storages that NumPy shares for a checkpoint or an export.

To copy the policy's weights to the reference, source ranks gather a bucket of weights at a time
(:func:`weight_buckets`), Ray's object store carries the bytes, and a :class:`ShardReceiver` on each target rank copies
its shards.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bridges.rules import shard
from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.hf_weights import gathered
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.model.scaled_weights import scaled_buffers
from skyrl_megatron.types import PARTS, Part

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


BLOCK_BYTES = 1 << 28


class HostMemory:
    """An allocator of host memory in blocks. After :meth:`rewind` the same requests return the same memory."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._block = self._used = 0

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return len(self._blocks) * self._block_bytes

    def take(self, count: int) -> Tensor:
        """Return contiguous memory, [count] uint8, uninitialised; at most one block."""
        assert count <= self._block_bytes, (count, self._block_bytes)
        # the rest of the block stays empty: the caller needs contiguous bytes
        if self._used + count > self._block_bytes:
            self._block, self._used = self._block + 1, 0
        return self._next(count)

    def pieces(self, count: int) -> list[Tensor]:
        """Return ``count`` bytes as a list of contiguous slices, [n] uint8 each, that fill the blocks completely."""
        found: list[Tensor] = []
        while count:
            if self._used == self._block_bytes:
                self._block, self._used = self._block + 1, 0
            size = min(count, self._block_bytes - self._used)
            found.append(self._next(size))
            count -= size
        return found

    def rewind(self) -> None:
        """Reuse all blocks from the beginning."""
        self._block = self._used = 0

    def _next(self, count: int) -> Tensor:
        if self._block == len(self._blocks):
            self._blocks.append(host_bytes(self._block_bytes))
        start, self._used = self._used, self._used + count
        return self._blocks[self._block][start : self._used]


def host_bytes(count: int) -> Tensor:
    """Allocate host memory, [count] uint8: pinned on a GPU machine, else in huge pages."""
    if device.has_cuda():
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    # huge pages: far fewer page faults when the memory is first written
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


WEIGHT_BUCKET_BYTES = 256 * 2**20
"""Approximate size of one bucket of weights on a source rank."""


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A whole Megatron weight, without vocabulary padding, as bytes that Ray can send to any process."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """[bytes] uint8."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WholeWeight:
        """Copy ``tensor`` […] to the host."""
        whole = tensor.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        return cls(name, str(whole.dtype).removeprefix("torch."), tuple(whole.shape), data)

    def tensor(self) -> Tensor:
        """Return a copy of the weight as a tensor, [shape] in its dtype."""
        # a copy: Ray's objects are read-only memory
        return torch.from_numpy(self.data.copy()).view(getattr(torch, self.dtype)).view(self.shape)


@torch.no_grad()
def weight_buckets(
    model: ModelChunks, groups: ProcessGroups, nbytes: int = WEIGHT_BUCKET_BYTES
) -> Iterator[list[WholeWeight]]:
    """Yield the weights in buckets of about ``nbytes``. Each weight is in one bucket of one rank, the first holder.

    The iteration gathers shards: all ranks of a pipeline stage must iterate together, over equally many buckets.
    """
    bucket: list[WholeWeight] = []
    passed = 0
    for weight in local_weights(model, groups):
        if weight.is_copy:
            continue
        gathered_weight = gathered(weight, groups)
        if gathered_weight is not None:
            bucket.append(WholeWeight.of(weight.entry.name, gathered_weight))
        passed += weight.tensor.nbytes  # equal on all ranks of the stage
        if passed >= nbytes:
            yield bucket
            bucket, passed = [], 0
    # also if it is empty: ranks of a stage iterate over equally many buckets
    yield bucket


class ShardReceiver:
    """Copies this rank's shards out of whole weights."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups) -> None:
        self.groups = groups
        self._missing: defaultdict[str, list[LocalWeight]] = defaultdict(list)
        for weight in local_weights(model, groups):
            self._missing[weight.entry.name].append(weight)

    @torch.no_grad()
    def take(self, weights: Iterable[WholeWeight]) -> None:
        """Copy this rank's shards of ``weights``. Raises WeightSyncError for a different shape or dtype."""
        for weight in weights:
            targets = self._missing.pop(weight.name, [])
            full = weight.tensor() if targets else None
            for target in targets:
                assert full is not None
                over = self.groups.etp if target.entry.is_expert else self.groups.tp
                rows = target.tensor.shape[0] * over.size()
                padded_vocab = rows if target.entry.split.vocab else None
                part = shard(full, target.entry, over.size(), over.rank(), padded_vocab)
                if part.shape != target.tensor.shape or part.dtype != target.tensor.dtype:
                    raise WeightSyncError(
                        f"{weight.name} is {part.dtype} {list(part.shape)} in the policy and {target.tensor.dtype} "
                        f"{list(target.tensor.shape)} in the reference: use one model and one dtype for both roles"
                    )
                target.tensor.copy_(part)

    def finish(self) -> None:
        """Raise WeightSyncError if a weight was not received, with its name."""
        if self._missing:
            name = next(iter(self._missing))
            raise WeightSyncError(
                f"{name} and {len(self._missing) - 1} more weights of the reference are missing in the policy: use "
                "one model for both roles"
            )


@dataclass(slots=True)
class _FreedStorage:
    """A storage whose device memory is freed, or will be once its bytes are on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    copies: list[Tensor]
    """Its bytes on the host; if empty, it is restored as zeros."""


class Offload:
    """Moves the parts of a model between device and host, and tracks where they are.

    ``chunks``: the model's chunks, wrapped in Megatron's DDP if they are trained; with several adapters, the chunks of
    each. ``optimizers``: empty for a model that only scores.
    """

    def __init__(self, chunks: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        self._chunks, self._optimizers = chunks, optimizers
        self._host = {part: HostMemory() for part in PARTS}
        self._emptied: dict[Part, list[_FreedStorage]] = {}
        self._leaving: dict[Part, tuple[list[_FreedStorage], Callable[[], None]]] = {}
        self._arriving: dict[Part, Any] = {}  # CUDA events
        self._stream: Any = None

    def away(self, part: Part) -> bool:
        """Return whether the part is offloaded."""
        return part in self._emptied

    @property
    def device_bytes(self) -> dict[Part, int]:
        """Bytes of each part on the device now."""
        return {
            part: 0 if part in self._emptied else sum(storage.nbytes() for storage in self._storages(part))
            for part in PARTS
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated for the parts, offloaded or not."""
        return sum(memory.nbytes for memory in self._host.values())

    @torch.no_grad()
    def start(self, parts: Iterable[Part]) -> None:
        """Start to copy ``parts`` to the host, after the work queued so far.

        :meth:`offload` frees their memory, unless :meth:`onload` or :meth:`wait` comes first, one of which precedes
        every change of them.
        """
        for part in PARTS:
            if part not in parts or part in self._emptied or part in self._leaving:
                continue
            # an arrival that is still under way must be complete before its bytes are read
            self.wait(part)
            self._host[part].rewind()
            leaving = []
            with self._copying():
                for storage in self._storages(part):
                    copies = [] if part == "gradients" else self._host[part].pieces(storage.nbytes())
                    for source, target in _pairs(storage, copies):
                        # non_blocking: pinned memory, on the copy stream; ``device.mark`` below tells when it
                        # is done
                        target.copy_(source, non_blocking=True)
                    leaving.append(_FreedStorage(storage, storage.nbytes(), copies))
                self._leaving[part] = leaving, device.mark()
            # reserved now, so that pinning does not happen within the first step: moments do not exist before
            # it
            if part == "optimizer":
                self._host[part].pieces(sum(map(pending_state_bytes, self._optimizers)))

    @torch.no_grad()
    def offload(self, parts: Iterable[Part]) -> None:
        """Move ``parts`` to the host, unless they are offloaded already; return when their device memory is free."""
        self.start(parts)
        for part in PARTS:
            if part in parts and part in self._leaving:
                self._emptied[part], copied = self._leaving.pop(part)
                # only then: freeing earlier would free what the copy still reads
                copied()
                for freed in self._emptied[part]:
                    freed.storage.resize_(0)
        # freed blocks stay in torch's allocator, where engines on the same GPU cannot use them
        device.empty_cache()

    @torch.no_grad()
    def onload(self, parts: Iterable[Part]) -> None:
        """Start to copy offloaded ``parts`` back to the device; :meth:`wait` completes it."""
        for part in PARTS:
            if part not in parts or part not in self._emptied:
                if part in parts:
                    self._keep(part)
                continue
            emptied = self._emptied.pop(part)
            for freed in emptied:
                # the same storage object grows again, so every view of it is valid at once
                freed.storage.resize_(freed.nbytes)
            with self._copying():
                for freed in emptied:
                    if not freed.copies:
                        _bytes(freed.storage).zero_()
                    for target, source in _pairs(freed.storage, freed.copies):
                        target.copy_(source, non_blocking=True)
                if device.has_cuda():
                    # an event instead of a synchronization: the copy runs while the model computes
                    self._arriving[part] = torch.cuda.current_stream().record_event()

    def wait(self, *parts: Part) -> None:
        """Make the current stream wait for the copies of ``parts``, which must not be offloaded."""
        for part in parts:
            assert part not in self._emptied, f"{part} are offloaded"
            self._keep(part)
            if (event := self._arriving.pop(part, None)) is not None:
                torch.cuda.current_stream().wait_event(event)

    def _keep(self, part: Part) -> None:
        """Drop the copy of a part that is leaving. The current stream changes it only after it was read."""
        # the copy may still read the memory that the current stream is about to change
        if self._leaving.pop(part, None) is not None and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _copying(self) -> Any:
        """Return a context in which copies run on a separate stream, after the work queued so far."""
        if device.has_cuda() and self._stream is None:
            self._stream = torch.cuda.Stream()
        if self._stream is not None:
            # after everything queued so far: the copy must see the last update
            self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _storages(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """Yield the distinct storages of a part on this device."""
        tensors: dict[Part, Callable[[], Iterable[Tensor]]] = {
            "weights": lambda: (parameter for chunk in self._chunks for parameter in _parameters(chunk)),
            "gradients": lambda: (buffer.grad_data for chunk in self._chunks for buffer in _buffers(chunk)),
            "optimizer": lambda: (t for optimizer in self._optimizers for t in optimizer_tensors(optimizer)),
        }
        # precision-aware optimizers have views of the weights as parameters: these leave with the weights
        seen = {tensor.untyped_storage()._cdata for tensor in tensors["weights"]()} if part == "optimizer" else set()
        for tensor in (memory for tensor_of_part in tensors[part]() for memory in memory_of(tensor_of_part)):
            storage = tensor.untyped_storage()
            # a CPU-offloaded optimizer has part of its state on the host already
            if storage._cdata not in seen and storage.device == device.device() and storage.nbytes():
                seen.add(storage._cdata)
                # numpy shares some storages with a checkpoint in progress: these cannot be freed
                if storage.resizable():
                    yield storage


def optimizer_tensors(optimizer: Any | None) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer, […] each, on any device, some of them several times.

    They are parameters (masters, or views of the model's), moments, and the tensors of the optimizers inside
    Megatron's HybridDeviceOptimizer.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # one part per group of parameters (dense, experts), or the optimizer itself
        outer = getattr(part, "optimizer", None)
        if outer is None:
            continue
        for inner in (outer, *getattr(outer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (state[name] for name in sorted(state) if torch.is_tensor(state[name]))
        yield from getattr(outer, "param_to_fp32_param", {}).values()


def pending_state_bytes(optimizer: Any | None) -> int:
    """Return the bytes that the first step of Adam or Muon will allocate on this device.

    They are the moments (one for a matrix of Muon's), and the master weights of a precision-aware optimizer
    (``FusedAdam.initialize_state`` of Transformer Engine).
    """
    size = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        outer = getattr(part, "optimizer", None)
        for inner in getattr(outer, "sub_optimizers", None) or ([] if outer is None else [outer]):
            types = getattr(inner, "name_to_dtype_map", {})
            names = ["exp_avg", "exp_avg_sq"] + ["master_param"] * getattr(inner, "master_weights", False)
            matrices = getattr(inner, "scale_invariant", ())
            for piece in (parameter for group in inner.param_groups for parameter in group["params"]):
                if piece.device != device.device() or inner.state.get(piece):
                    # state that exists is counted where its storages are
                    continue
                if id(piece) in matrices:
                    size += piece.nbytes
                    continue
                dtypes = {name: types.get(name, piece.dtype) for name in names}
                if getattr(inner, "store_param_remainders", False) and piece.dtype == torch.bfloat16:
                    dtypes["master_param"] = torch.int16
                widths = [2 if dtype == torch.uint8 else dtype.itemsize for dtype in dtypes.values()]  # memory_of
                size += piece.numel() * sum(widths) + (0 if types else 4)  # torch's Adam has a step counter
    return size


def memory_of(tensor: Any) -> list[Tensor]:
    """Return the tensors […] that hold a tensor's bytes: itself, or data and transpose of an FP8 tensor.

    Transformer Engine's Adam allocates the transpose on GPUs before Blackwell and does not read it
    (``Float8Quantizer::create_tensor``).
    """
    if not hasattr(tensor, "_transpose"):
        return [tensor]
    return [each for each in (tensor._data, tensor._transpose) if each is not None]


def _parameters(chunk: Any) -> Iterator[Tensor]:
    """Yield the parameters in a chunk's modules and in its DDP buffers; a detached adapter is only in the latter."""
    yield from chunk.parameters()
    yield from scaled_buffers(chunk)
    yield from getattr(chunk, "params_with_grad", ())


def _buffers(chunk: Any) -> list[Any]:
    """Return Megatron's gradient buffers of a chunk; a chunk outside DDP has none."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers] if hasattr(chunk, "expert_parallel_buffers") else []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pairs(storage: torch.UntypedStorage, copies: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (bytes of the storage, slice of host memory that they are copied to)."""
    if copies:
        yield from zip(_bytes(storage).split([len(piece) for piece in copies]), copies, strict=True)
