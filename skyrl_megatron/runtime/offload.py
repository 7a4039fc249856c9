"""Move parameters, gradients and optimizer states to host memory and back, and free their storages.

It is taken in blocks of a fixed power of two: torch's allocator of pinned memory rounds every request up to one, and a
request for 40 GB would hold 64.

Ranks of the source gather the shards of a few weights at a time (:func:`rounds`); each rank of the target takes its
own share of whole weights that it holds (:class:`Taker`). What lies between, Ray's object store, sees bytes.

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

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from bridges.rules import shard
from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.hf_weights import gathered
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.model.scaled_weights import scaled_buffers

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


BLOCK_BYTES = 1 << 28


class HostMemory:
    """Pieces of blocks, handed out in order. :meth:`rewind` hands the same memory out again: what is asked for in the
    same order lies in the same place, and nothing is allocated twice."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._block = self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return len(self._blocks) * self._block_bytes

    def take(self, count: int) -> Tensor:
        """Return ``count`` bytes in one piece, uint8, at most a block; what they hold is undefined."""
        assert count <= self._block_bytes, (count, self._block_bytes)
        if self._used + count > self._block_bytes:
            self._block, self._used = self._block + 1, 0
        return self._next(count)

    def pieces(self, count: int) -> list[Tensor]:
        """Return ``count`` bytes in as few pieces as fill the blocks without a gap."""
        found: list[Tensor] = []
        while count:
            if self._used == self._block_bytes:
                self._block, self._used = self._block + 1, 0
            size = min(count, self._block_bytes - self._used)
            found.append(self._next(size))
            count -= size
        return found

    def rewind(self) -> None:
        """Hand everything out again, from the beginning."""
        self._block = self._used = 0

    def _next(self, count: int) -> Tensor:
        if self._block == len(self._blocks):
            self._blocks.append(host_bytes(self._block_bytes))
        start, self._used = self._used, self._used + count
        return self._blocks[self._block][start : self._used]


def host_bytes(count: int) -> Tensor:
    """Take ``count`` bytes of host memory, uint8: pinned on a GPU machine, else in large pages, which a first touch
    fills fast."""
    if device.has_cuda():
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


ROUND_BYTES = 256 * 2**20
"""What a rank of the source gives at a time, about."""


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A whole weight as it is in Megatron, vocabulary not padded, in a form that any process can read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """[bytes] uint8."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> WholeWeight:
        """Copy ``tensor`` to the host."""
        whole = tensor.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        return cls(name, str(whole.dtype).removeprefix("torch."), tuple(whole.shape), data)

    def tensor(self) -> Tensor:
        """Return the weight, in memory of its own."""
        return torch.from_numpy(self.data.copy()).view(getattr(torch, self.dtype)).view(self.shape)


@torch.no_grad()
def rounds(model: ModelChunks, groups: ProcessGroups, nbytes: int = ROUND_BYTES) -> Iterator[list[WholeWeight]]:
    """Yield this rank's part of each round: every weight stands in one round of one rank, the first of those that hold
    it. All ranks of a pipeline stage go through equally many rounds, which gather, together."""
    given: list[WholeWeight] = []
    passed = 0
    for weight in local_weights(model, groups):
        if weight.is_copy:
            continue
        whole = gathered(weight, groups)
        if whole is not None:
            given.append(WholeWeight.of(weight.entry.name, whole))
        passed += weight.tensor.nbytes  # alike on all ranks of the stage, whether they give it or not
        if passed >= nbytes:
            yield given
            given, passed = [], 0
    yield given


class Taker:
    """Takes this rank's share out of whole weights, until it has every one."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups) -> None:
        self.groups = groups
        self._missing: defaultdict[str, list[LocalWeight]] = defaultdict(list)
        for weight in local_weights(model, groups):
            self._missing[weight.entry.name].append(weight)

    @torch.no_grad()
    def take(self, weights: Iterable[WholeWeight]) -> None:
        """Copy what belongs to this rank. Raises WeightSyncError for a weight of another shape or type."""
        for given in weights:
            places = self._missing.pop(given.name, [])
            whole = given.tensor() if places else None
            for place in places:
                assert whole is not None
                over = self.groups.etp if place.entry.is_expert else self.groups.tp
                rows = place.tensor.shape[0] * over.size()
                own = shard(whole, place.entry, over.size(), over.rank(), rows if place.entry.split.vocab else None)
                if own.shape != place.tensor.shape or own.dtype != place.tensor.dtype:
                    raise WeightSyncError(
                        f"{given.name} is {own.dtype} {list(own.shape)} in the policy and {place.tensor.dtype} "
                        f"{list(place.tensor.shape)} in the reference: give both roles one model and one type"
                    )
                place.tensor.copy_(own)

    def finish(self) -> None:
        """Raise WeightSyncError naming a weight that never came."""
        if self._missing:
            name = next(iter(self._missing))
            raise WeightSyncError(
                f"{name} and {len(self._missing) - 1} more weights of the reference are not among the policy's: give "
                "both roles one model"
            )


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
            for piece in (each for group in inner.param_groups for each in group["params"]):
                if piece.device != device.device() or inner.state.get(piece):
                    continue
                dtypes = {name: types.get(name, piece.dtype) for name in names}
                if getattr(inner, "store_param_remainders", False) and piece.dtype == torch.bfloat16:
                    dtypes["master_param"] = torch.int16
                widths = [2 if dtype == torch.uint8 else dtype.itemsize for dtype in dtypes.values()]  # memory_of
                size += piece.numel() * sum(widths) + (0 if types else 4)  # torch's counts its steps
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
