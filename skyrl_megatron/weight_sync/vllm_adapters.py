"""Adapters in vLLM 0.32: received into slots next to the serving ones, checked, then switched to.

A module's own ``set_lora`` is run with factors that have no memory. What it would copy of them is the route, and goes
into the memory of a free slot as it arrives; the rest of it, zeros and flags, is done before.

vLLM takes adapters from folders, and 37,000 tensors of a large one, each by its name. Here its modules are given what
its LoRA manager would have made of them: one set of stacked factors for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.adapter_tensors import FactorName, stacked
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.point_to_point import ParcelReceiver
from skyrl_megatron.weight_sync.slices import FilledTensor, Rectangle, Route, Unroutable, merged, rectangles, width_of
from skyrl_megatron.weight_sync.tensors import dtype_name, metadata_of

type Pair = dict[str, Tensor]
"""``A`` [rank, in] and ``B`` [out, rank] of a projection; those of experts [experts or 1, …]."""
type Modules = dict[str, LoRALayerWeights]
"""The factors of each of vLLM's modules, by its name."""


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Pair]]:
    """Sort tensors by adapter and by the projections that they serve."""
    adapters: dict[str, dict[str, Pair]] = {}
    for name, tensor in tensors.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            adapters.setdefault(factor.adapter, {}).setdefault(module, {})[factor.letter] = tensor
    return adapters


@torch.no_grad()
def fill_slot(modules: Mapping[str, Any], slot: int, factors: Modules) -> None:
    """Let each module copy its factors to its memory of a slot; one that has none gets zeros."""
    for name, module in modules.items():
        if name in factors:
            module.set_lora(slot, factors[name].lora_a, factors[name].lora_b)
        else:
            module.reset_lora(slot)


@torch.no_grad()
def modules_of(manager: Any, pairs: Mapping[str, Pair]) -> tuple[Modules, list[str]]:
    """Return the factors for each of vLLM's modules, and the projections that belong to none of them.

    Raises WeightSyncError for a projection with one factor, and for a rank that the engine has no room for.
    """
    renamed = _renaming(manager.model)
    left = {renamed(module): (module, pair) for module, pair in pairs.items()}
    most = manager.lora_config.max_lora_rank
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise WeightSyncError(f"{module} has a lora_{next(iter(pair))} alone")
        if (rank := pair["A"].shape[-2]) > most or rank != pair["B"].shape[-1]:
            raise WeightSyncError(
                f"factors of {module} are {list(pair['A'].shape)} and {list(pair['B'].shape)}, the engine was started "
                f"for a rank of at most {most}"
            )
    modules: Modules = {}
    for name, wrapper in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        experts = isinstance(wrapper, FusedMoEWithLoRA)
        if experts:  # gate, down and up of expert 0, then of expert 1, …
            parts = [stacked(part) for part in parts[:3]]
        found: list[Pair | None] = [left.pop(part)[1] if part in left else None for part in parts]
        if not any(found):
            continue
        if experts:
            found = _of_local_experts(wrapper, found)
        a, b = ([None if pair is None else pair[letter] for pair in found] for letter in "AB")
        if experts or name in manager.packed_modules:
            modules[name] = PackedLoRALayerWeights(name, 0, [None] * len(a), a, b, scaling=[1.0] * len(a))
        else:
            modules[name] = LoRALayerWeights(name, 0, 0, a[0], b[0], scaling=1.0)
    return modules, [module for module, _ in left.values()]


def _of_local_experts(wrapper: Any, found: Sequence[Pair | None]) -> list[Pair | None]:
    """Return the pairs of this rank's experts, [local experts, …]; zeros for a projection that has none."""
    count = wrapper.local_num_experts
    first = wrapper.ep_rank * count if wrapper.use_ep else 0
    some = next(pair["A"] for pair in found if pair is not None)
    width, inner = wrapper.hidden_size, wrapper.intermediate_size_per_partition * wrapper.tp_size

    def local(factor: Tensor) -> Tensor:
        return factor.expand(count, -1, -1) if len(factor) == 1 else factor[first : first + count]

    def nothing(rows: int, columns: int) -> Pair:
        rank = some.shape[-2]
        return {"A": some.new_zeros(count, rank, columns), "B": some.new_zeros(count, rows, rank)}

    missing = [nothing(inner, width), nothing(width, inner), nothing(inner, width)]
    return [
        zeros if pair is None else {letter: local(factor) for letter, factor in pair.items()}
        for pair, zeros in zip(found, missing, strict=True)
    ]


def _renaming(model: Any) -> Any:
    """Return vLLM's name of a module of the checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return (lambda module: module) if mapper is None else mapper.get_rename_mapper()._map_name


type Region = tuple[int, torch.Size, tuple[int, ...], int]
"""A tensor, by number; shape, strides and offset of a part of it."""


class _Copies(TorchDispatchMode):
    """Notes copies of factors instead of making them. ``dry``: nothing else is written either."""

    def __init__(self, *, dry: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dry = dry
        self.found: list[tuple[Tensor, Tensor]] = []
        """(where to, part of a factor)."""
        self.zeros: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not args[0].is_meta:
            if func is torch.ops.aten.copy_.default and args[1].is_meta:
                self.found.append((args[0], args[1]))
                return args[0]
            if self.dry:
                return args[0]
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_zeros.default:
            self.zeros.append(made)
        return made


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a target: what ``Tensor.as_strided`` takes, with the offset in it."""

    target: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        """View it in the target's memory."""
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)


@dataclass(slots=True)
class AdapterRoute:
    """What one worker needs of the factors of all adapters."""

    route: Route
    tensors: Sequence[TensorMeta]
    modules: Mapping[str, Modules]
    """Adapter → the factors of each module, without memory."""
    unplaced: Sequence[str]
    """Projections that no module here has a place for."""
    stacks: Sequence[tuple[str, Tensor]]
    """Of each target, its adapter and the tensor whose slots it is one of."""
    again: Sequence[tuple[_Place, _Place]]
    """Parts of targets that are the same factor: it comes once, and is copied from the first to the second."""
    filled: dict[int, str] = field(default_factory=dict)
    """Slot → the adapter that it held last, by this route: all else in it is zero, and flags are set."""


def record_adapter_route(manager: Any, tensors: Sequence[TensorMeta]) -> AdapterRoute:
    """Return the route of ``manager``'s modules for ``tensors``, whole ones. Nothing changes.

    Raises Unroutable for what is not copied as it is, WeightSyncError for factors that the engine has no place for.
    """
    factors = {meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta") for meta in tensors}
    recording = _Recording(tensors, {_storage(factor): number for number, factor in enumerate(factors.values())})
    modules: dict[str, Modules] = {}
    unplaced: list[str] = []
    with _Copies(dry=True) as copies:
        for adapter, pairs in pairs_of(factors).items():
            modules[adapter], left = modules_of(manager, pairs)
            unplaced += left
            for name, module in manager.modules.items():
                if name in modules[adapter]:
                    copies.found.clear()
                    fill_slot({name: module}, 0, modules[adapter])
                    recording.take(adapter, name, module, copies)
    return AdapterRoute(recording.route(), tensors, modules, unplaced, recording.stacks, recording.again)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class _Recording:
    tensors: Sequence[TensorMeta]
    numbers: Mapping[int, int]
    """Storage of a factor → number of its tensor."""
    targets: list[FilledTensor] = field(default_factory=list)
    stacks: list[tuple[str, Tensor]] = field(default_factory=list)
    again: list[tuple[_Place, _Place]] = field(default_factory=list)
    known: dict[tuple[str, str, str], int] = field(default_factory=dict)
    places: dict[Region, _Place] = field(default_factory=dict)
    """Where each part of a factor goes first."""

    def take(self, adapter: str, path: str, module: torch.nn.Module, copies: _Copies) -> None:
        """Take the copies that a module makes into its first slot."""
        stacks = _stacks(module)
        zeros = {_storage(each) for each in copies.zeros}
        for into, part in copies.found:
            if _storage(part) in zeros:
                continue
            if _storage(part) not in self.numbers or part.dtype != self._meta(part).torch_dtype:
                raise Unroutable(f"{path} does not copy a factor as it is")
            if _storage(into) not in stacks:
                raise Unroutable(f"{path} copies a factor to where no slot is")
            name, stack = stacks[_storage(into)]
            target = self._target(adapter, path, name, stack)
            for region, place in self._parts(target, stack, into, part.broadcast_to(into.shape)):
                first = self.places.setdefault(region, place)
                if first is not place:
                    self.again.append((first, place))

    def route(self) -> Route:
        """Return what comes from trainer ranks."""
        rows: list[tuple[int, ...]] = []
        found: dict[tuple[int, int], list[Rectangle]] = {}  # by (tensor, target)
        for (tensor, shape, strides, offset), place in self.places.items():
            width = width_of(self.tensors[tensor].shape)
            try:
                each = rectangles(shape, (strides, offset), (place.strides, place.offset), width)
            except ValueError as error:
                raise Unroutable(f"{self.tensors[tensor].name}: {error}") from error
            found.setdefault((tensor, place.target), []).extend(each)
        for pair, several in found.items():
            rows += [(*pair, *each) for each in merged(sorted(several, key=lambda part: (part.column, part.row)))]
        return Route.of(self.targets, rows)

    def _meta(self, part: Tensor) -> TensorMeta:
        return self.tensors[self.numbers[_storage(part)]]

    def _target(self, adapter: str, path: str, name: str, stack: Tensor) -> int:
        if (adapter, path, name) not in self.known:
            self.known[adapter, path, name] = len(self.targets)
            size = stack.numel() // len(stack)
            self.targets.append((f"{adapter}:{path}" if adapter else path, name, dtype_name(stack), size, -1))
            self.stacks.append((adapter, stack))
        return self.known[adapter, path, name]

    def _parts(self, target: int, stack: Tensor, into: Tensor, part: Tensor) -> Iterator[tuple[Region, _Place]]:
        """Yield the parts of a factor that are copied, and where to: one after the other what is copied repeatedly."""
        repeated = [dim for dim, (size, step) in enumerate(zip(part.shape, part.stride(), strict=True)) if not step]
        for index in itertools.product(*(range(part.shape[dim]) for dim in repeated)):
            one, to = part, into
            for dim, number in zip(repeated, index, strict=True):
                one, to = one.narrow(dim, number, 1), to.narrow(dim, number, 1)
            offset = int(to.storage_offset() - stack.storage_offset())
            number = self.numbers[_storage(part)]
            strides = tuple(0 if dim in repeated else step for dim, step in enumerate(one.stride()))
            yield (
                (number, one.shape, strides, int(one.storage_offset())),
                _Place(target, to.shape, tuple(to.stride()), offset),
            )


def _stacks(module: torch.nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return the tensors of a module that hold all slots, [slots, …], and their names, by storage."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in vars(module).items():
        if not name.endswith("_stacked"):
            continue
        for number, each in enumerate((value,) if isinstance(value, Tensor) else value):
            known = found.get(_storage(each))  # views of one slot's experts are lists of that name too
            if each.is_contiguous() and (known is None or known[1].numel() < each.numel()):
                found[_storage(each)] = f"{name}.{number}", each
    return found


class SlotTargets:
    """The memory of a free slot for each of some adapters (``parcel_receiver.Targets``). ``slots``: adapter → slot."""

    def __init__(self, manager: Any, route: AdapterRoute, slots: Mapping[str, int]) -> None:
        self.route, self.slots = route, slots
        with torch.no_grad(), _Copies(dry=False):
            for adapter, slot in slots.items():
                if route.filled.get(slot) != adapter:
                    fill_slot(manager.modules, slot, route.modules[adapter])
                    route.filled[slot] = adapter

    def memory(self, target: int) -> Tensor:
        adapter, stack = self.route.stacks[target]
        return stack[self.slots[adapter]].view(-1)

    def complete(self, target: int) -> None:
        """Do nothing: what was copied is where kernels read it."""

    @torch.no_grad()
    def finish(self) -> None:
        """Copy what modules share to where it is needed again."""
        for first, other in self.route.again:
            if self.route.stacks[other.target][0] in self.slots:
                source, copy = first.of(self.memory(first.target)), other.of(self.memory(other.target))
                copy.copy_(source)
                if not torch.equal(copy, source):
                    path, name, *_ = self.route.route.targets[other.target]
                    raise WeightSyncError(f"{path}.{name} is not what was copied to it")


class AdapterExtension:
    """Methods of a worker that hold adapters; ``compat.WorkerExtension`` mixes them in."""

    weight_transfer_engine: Any
    model_runner: Any
    skyrl_slots: Mapping[str, int] = {}
    """Adapter → the slot that it was received into, and not activated."""
    skyrl_route: AdapterRoute | None = None
    """What :meth:`skyrl_record_adapter_route` found."""
    skyrl_travelling: Sequence[str] = ()
    """The adapters of the last update by routes."""

    def skyrl_record_adapter_route(self, tensors: list[list[Any]]) -> tuple[list[FilledTensor], bytes] | str:
        """Return the worker's route for ``tensors``, fields of :class:`TensorMeta`, or why it has none."""
        metadata = [metadata_of(*item) for item in tensors]
        try:
            self.skyrl_route = record_adapter_route(self._manager(), metadata)
        except Unroutable as error:
            return str(error)
        self.weight_transfer_engine.take_route(self.skyrl_route.route, metadata)
        return self.skyrl_route.route.plain

    def skyrl_stage_adapters(self, senders: list[list[list[Any]]] | None) -> tuple[list[list[int]], Sequence[str]]:
        """Receive adapters into free slots. ``senders``: as in ``vllm_backend.UpdateInfo``; by routes, one list of all
        that travels.

        Returns the checksums of the buckets, per sender, and the projections that no module here has a place for.
        Raises WeightSyncError for an adapter that the engine was not started for.
        """
        self.skyrl_slots = {}
        try:
            routed = isinstance(self.weight_transfer_engine.receiver, ParcelReceiver)
            self.skyrl_slots, sums, left = self._by_routes(senders) if routed else self._by_buckets(senders)
        except BaseException:
            self.weight_transfer_engine.shutdown()
            raise
        device.mark()()
        return sums, left

    def _by_buckets(
        self, senders: list[list[list[Any]]] | None
    ) -> tuple[dict[str, int], list[list[int]], Sequence[str]]:
        receiver = self.weight_transfer_engine.prepared(senders)
        tensors = dict(receiver.tensors())
        receiver.finish()
        manager, left = self._manager(), []
        adapters = pairs_of(tensors)
        slots = self._free_slots(list(adapters))
        self.skyrl_route = None  # it knows what was in slots
        for name, pairs in adapters.items():
            modules, unplaced = modules_of(manager, pairs)
            fill_slot(manager.modules, slots[name], modules)
            left += unplaced
        return slots, receiver.checksums, left

    def _by_routes(
        self, senders: list[list[list[Any]]] | None
    ) -> tuple[dict[str, int], list[list[int]], Sequence[str]]:
        if senders is not None:
            named = (FactorName.parse(name).adapter for sender in senders for name, *_ in sender)
            self.skyrl_travelling = list(dict.fromkeys(named))
        receiver, route = self.weight_transfer_engine.receiver, self.skyrl_route
        assert route is not None, "a worker without a route has no parcels"
        slots = self._free_slots(self.skyrl_travelling)
        targets = SlotTargets(self._manager(), route, slots)
        device.mark()()  # what is received is written by a stream of its own
        of_tensor = [meta.adapter in slots for meta in route.tensors]
        receiver.receive(targets, [n for n, row in enumerate(receiver.parcels.buckets) if of_tensor[row[5]]])
        targets.finish()
        return slots, receiver.checksums, route.unplaced

    def _free_slots(self, names: Sequence[str]) -> dict[str, int]:
        held = self._manager().lora_index_to_id
        free = [slot for slot, number in enumerate(held) if number is None]
        if len(free) < len(names):
            raise WeightSyncError(f"no slots are free for {len(names)} adapters: {held} are held")
        return dict(zip(names, free, strict=False))

    def skyrl_activate_adapters(self, numbers: dict[str, int]) -> list[int]:
        """Let the slots that adapters were received into last, by name, be these numbers; return all that are held.
        Those that requests use stay."""
        slots, self.skyrl_slots = self.skyrl_slots, {}
        if missing := [name or "the adapter" for name in numbers if name not in slots]:
            raise WeightSyncError(f"{', '.join(missing)} was not received")
        manager = self._manager()
        for name, number in numbers.items():  # as LoRAModelManager.activate_adapter does
            manager._registered_adapters[number] = LoRAModel(number, 0, {})
            manager._active_adapters[number] = None
            manager.lora_index_to_id[slots[name]] = number
        return self._active()

    def skyrl_keep_adapters(self, numbers: list[int]) -> list[int]:
        """Drop what was received and not activated, and all adapters but ``numbers``; return those that are held."""
        self.skyrl_slots = {}
        manager = self._manager()
        for number in list(manager.list_adapters()):
            if number not in numbers:
                manager.remove_adapter(number)
        return self._active()

    def _active(self) -> list[int]:
        return sorted(number for number in self._manager().lora_index_to_id if number is not None)

    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager
