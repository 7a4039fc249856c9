"""Adapters in vLLM 0.32: received into free slots while others serve, verified, then activated.

Every worker process of an engine with adapters imports this module before the model is built.

vLLM loads adapters from folders, tensor by tensor: 37,000 tensors for a large one. Here its modules get what its LoRA
manager would make of them: one set of stacked factors per module.

With a reshard plan, each module's ``set_lora`` runs once with factors on the meta device. The copies that it would
make are the target map, and received slices go straight into the memory of a free slot. Zeros and flags of the slot
are set before.
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
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.platforms import current_platform

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.inference.vllm.compat import WorkerExtension
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.point_to_point import SliceReceiver
from skyrl_megatron.weight_sync.slices import (
    ReshardUnsupported,
    StridedCopy,
    TargetMap,
    TargetTensor,
    merge_copies,
    strided_copies,
    width_of,
)
from skyrl_megatron.weight_sync.tensors import dtype_name, metadata_of
from skyrl_megatron_lora.tensors import FactorName, stacked
from skyrl_megatron_lora.vllm_experts import choose_experts_with_adapters

type Pair = dict[str, Tensor]
"""``A`` [rank, in] and ``B`` [out, rank] of a projection; those of experts [experts or 1, …]."""
type Modules = dict[str, LoRALayerWeights]
"""The factors of each of vLLM's modules, by its name."""


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Pair]]:
    """Group factors (:data:`Pair` has their shapes, [rank, in] and [out, rank]), by their names, by adapter and by the
    projections that they serve."""
    adapters: dict[str, dict[str, Pair]] = {}
    for name, tensor in tensors.items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            adapters.setdefault(factor.adapter, {}).setdefault(module, {})[factor.letter] = tensor
    return adapters


@torch.no_grad()
def fill_slot(modules: Mapping[str, Any], slot: int, factors: Modules) -> None:
    """Copy the factors of each module into its slot. A module without factors gets zeros."""
    for name, module in modules.items():
        if name in factors:
            module.set_lora(slot, factors[name].lora_a, factors[name].lora_b)
        else:
            # a free slot still has the factors of the adapter that was removed from it
            module.reset_lora(slot)


@torch.no_grad()
def modules_of(manager: Any, pairs: Mapping[str, Pair]) -> tuple[Modules, list[str]]:
    """Return the factors of each of vLLM's modules, and the projections that belong to none of them.

    Raises WeightSyncError for a projection with only one factor, and for a rank above the engine's ``max_lora_rank``.
    """
    renamed = _renaming(manager.model)
    left = {renamed(module): (module, pair) for module, pair in pairs.items()}
    most = manager.lora_config.max_lora_rank
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise WeightSyncError(f"{module} has only a lora_{next(iter(pair))}: send both factors in one update")
        if (rank := pair["A"].shape[-2]) > most or rank != pair["B"].shape[-1]:
            raise WeightSyncError(
                f"factors of {module} are {list(pair['A'].shape)} and {list(pair['B'].shape)}, the engine was started "
                f"for a rank of at most {most}: start it with the trainer.policy.model.lora of this run"
            )
    modules: Modules = {}
    for name, wrapper in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        experts = isinstance(wrapper, FusedMoEWithLoRA)
        if experts:  # gate, down and up of expert 0, then of expert 1, …
            parts = [stacked(part) for part in parts[:3]]
        factors: list[Pair | None] = [left.pop(part)[1] if part in left else None for part in parts]
        if not any(factors):
            continue
        if experts:
            factors = _of_local_experts(wrapper, factors)
        a, b = ([None if pair is None else pair[letter] for pair in factors] for letter in "AB")
        if experts or name in manager.packed_modules:
            # scaling 1: the adapter's scale is in lora_B already
            modules[name] = PackedLoRALayerWeights(name, 0, [None] * len(a), a, b, scaling=[1.0] * len(a))
        else:
            modules[name] = LoRALayerWeights(name, 0, 0, a[0], b[0], scaling=1.0)
    return modules, [module for module, _ in left.values()]


def _of_local_experts(wrapper: Any, pairs: Sequence[Pair | None]) -> list[Pair | None]:
    """Return the factors of this rank's experts, [local experts, …]; zeros for a projection without an adapter."""
    count = wrapper.local_num_experts
    first = wrapper.ep_rank * count if wrapper.use_ep else 0
    some = next(pair["A"] for pair in pairs if pair is not None)
    width, inner = wrapper.hidden_size, wrapper.intermediate_size_per_partition * wrapper.tp_size

    def local(factor: Tensor) -> Tensor:
        return factor.expand(count, -1, -1) if len(factor) == 1 else factor[first : first + count]

    def nothing(rows: int, columns: int) -> Pair:
        rank = some.shape[-2]
        return {"A": some.new_zeros(count, rank, columns), "B": some.new_zeros(count, rows, rank)}

    # in vLLM's order of an expert's matrices: gate, down, up
    missing = [nothing(inner, width), nothing(width, inner), nothing(inner, width)]
    return [
        zeros if pair is None else {letter: local(factor) for letter, factor in pair.items()}
        for pair, zeros in zip(pairs, missing, strict=True)
    ]


def _renaming(model: Any) -> Any:
    """Return a function from the name of a language model's module to vLLM's name."""
    prefix = ""
    if supports_multimodal(model):
        (prefix,) = (f"{name}." for name, part in model.named_modules() if part is model.get_language_model())
        model = model.get_language_model()
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = (lambda module: module) if mapper is None else mapper.get_rename_mapper()._map_name
    return lambda module: prefix + renamed(module)


type Region = tuple[int, torch.Size, tuple[int, ...], int]
"""Index of a tensor, and the shape, strides and offset of a part of it."""


class _CopyRecorder(TorchDispatchMode):
    """Records copies of factors instead of making them. ``dry``: other writes are skipped too."""

    def __init__(self, *, dry: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dry = dry
        self.found: list[tuple[Tensor, Tensor]] = []
        """(target, part of a factor) of each copy."""
        self.zeros: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and not args[0].is_meta:
            if func is torch.ops.aten.copy_.default and args[1].is_meta:
                self.found.append((args[0], args[1]))
                return args[0]
            if self.dry:
                return args[0]
        made = func(*args, **(kwargs or {}))
        # modules pad factors with zeros before they copy them; copies of these are no copies of a factor
        if func is torch.ops.aten.new_zeros.default:
            self.zeros.append(made)
        return made


@dataclass(frozen=True, slots=True)
class _SlotView:
    """A part of a target: the arguments of ``Tensor.as_strided``, with the offset in the target."""

    target: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        """View the part in the target's memory."""
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)


@dataclass(slots=True)
class AdapterTargetMap:
    """The slices that one worker needs of the factors of all adapters."""

    target_map: TargetMap
    tensors: Sequence[TensorMeta]
    modules: Mapping[str, Modules]
    """Adapter → the factors of each module, on the meta device."""
    unplaced: Sequence[str]
    """Projections that belong to no module of this worker."""
    stacks: Sequence[tuple[str, Tensor]]
    """The adapter of each target, and the tensor of all slots that the target is one slot of."""
    duplicates: Sequence[tuple[_SlotView, _SlotView]]
    """Parts of targets that hold the same factor. It is received once, and copied from the first part to the
    second."""
    filled: dict[int, str] = field(default_factory=dict)
    """Slot → the adapter that this target map last put into it. All other memory of the slot is zero."""


def record_adapter_targets(manager: Any, tensors: Sequence[TensorMeta]) -> AdapterTargetMap:
    """Record the target map of ``manager``'s modules for ``tensors`` (whole tensors). Nothing changes.

    Raises ReshardUnsupported if a module changes a factor before it copies it, WeightSyncError for factors that do not
    fit the engine.
    """
    factors = {meta.name: torch.empty(meta.shape, dtype=meta.torch_dtype, device="meta") for meta in tensors}
    recording = _TargetRecorder(tensors, {_storage(factor): number for number, factor in enumerate(factors.values())})
    modules: dict[str, Modules] = {}
    unplaced: list[str] = []
    with _CopyRecorder(dry=True) as copies:
        for adapter, pairs in pairs_of(factors).items():
            modules[adapter], left = modules_of(manager, pairs)
            unplaced += left
            for name, module in manager.modules.items():
                if name in modules[adapter]:
                    copies.found.clear()
                    fill_slot({name: module}, 0, modules[adapter])
                    recording.take(adapter, name, module, copies)
    return AdapterTargetMap(recording.target_map(), tensors, modules, unplaced, recording.stacks, recording.duplicates)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class _TargetRecorder:
    tensors: Sequence[TensorMeta]
    numbers: Mapping[int, int]
    """Storage of a factor → index of its tensor."""
    targets: list[TargetTensor] = field(default_factory=list)
    stacks: list[tuple[str, Tensor]] = field(default_factory=list)
    duplicates: list[tuple[_SlotView, _SlotView]] = field(default_factory=list)
    known: dict[tuple[str, str, str], int] = field(default_factory=dict)
    places: dict[Region, _SlotView] = field(default_factory=dict)
    """The first target of each part of a factor."""

    def take(self, adapter: str, path: str, module: torch.nn.Module, copies: _CopyRecorder) -> None:
        """Record the copies that a module makes into its first slot."""
        stacks = _stacks(module)
        # the slot is filled with zeros before anything is received, see SlotTargets
        zeros = {_storage(tensor) for tensor in copies.zeros}
        for into, part in copies.found:
            if _storage(part) in zeros:
                continue
            if _storage(part) not in self.numbers or part.dtype != self._meta(part).torch_dtype:
                raise ReshardUnsupported(f"{path} changes a factor before it copies it")
            if _storage(into) not in stacks:
                raise ReshardUnsupported(f"{path} copies a factor to memory outside of its slots")
            name, stack = stacks[_storage(into)]
            target = self._target(adapter, path, name, stack)
            for region, view in self._parts(target, stack, into, part.broadcast_to(into.shape)):
                first = self.places.setdefault(region, view)
                # the same part is needed twice, as one A is by q, k and v: received once, then copied
                if first is not view:
                    self.duplicates.append((first, view))

    def target_map(self) -> TargetMap:
        """Return what comes from trainer ranks."""
        rows: list[tuple[int, ...]] = []
        copies: dict[tuple[int, int], list[StridedCopy]] = {}  # by (tensor, target)
        for (tensor, shape, strides, offset), view in self.places.items():
            width = width_of(self.tensors[tensor].shape)
            try:
                of_part = strided_copies(shape, (strides, offset), (view.strides, view.offset), width)
            except ValueError as error:
                raise ReshardUnsupported(f"{self.tensors[tensor].name}: {error}") from error
            copies.setdefault((tensor, view.target), []).extend(of_part)
        for pair, several in copies.items():
            rows += [
                (*pair, *copy) for copy in merge_copies(sorted(several, key=lambda part: (part.column, part.row)))
            ]
        return TargetMap.of(self.targets, rows)

    def _meta(self, part: Tensor) -> TensorMeta:
        return self.tensors[self.numbers[_storage(part)]]

    def _target(self, adapter: str, path: str, name: str, stack: Tensor) -> int:
        if (adapter, path, name) not in self.known:
            self.known[adapter, path, name] = len(self.targets)
            size = stack.numel() // len(stack)
            self.targets.append((f"{adapter}:{path}" if adapter else path, name, dtype_name(stack), size, -1))
            self.stacks.append((adapter, stack))
        return self.known[adapter, path, name]

    def _parts(self, target: int, stack: Tensor, into: Tensor, part: Tensor) -> Iterator[tuple[Region, _SlotView]]:
        """Yield the parts of a factor that are copied, with their targets. A broadcast copy yields one part for each
        repetition."""
        # dimensions of stride 0 are broadcasts: one part of the factor has several targets there
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
                _SlotView(target, to.shape, tuple(to.stride()), offset),
            )


def _stacks(module: torch.nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Return storage → (name, tensor) of the tensors of a module that hold all slots, [slots, …]."""
    stacks: dict[int, tuple[str, Tensor]] = {}
    for name, value in vars(module).items():
        if not name.endswith("_stacked"):
            continue
        for number, tensor in enumerate((value,) if isinstance(value, Tensor) else value):
            largest = stacks.get(_storage(tensor))  # views of one slot's experts are lists of that name too
            if tensor.is_contiguous() and (largest is None or largest[1].numel() < tensor.numel()):
                stacks[_storage(tensor)] = f"{name}.{number}", tensor
    return stacks


class SlotTargets:
    """Free slots as targets for some adapters (``point_to_point.Targets``). ``slots``: adapter → slot."""

    def __init__(self, manager: Any, target_map: AdapterTargetMap, slots: Mapping[str, int]) -> None:
        self.target_map, self.slots = target_map, slots
        # skips the copies of factors, which have no memory, and lets zeros and flags through
        with torch.no_grad(), _CopyRecorder(dry=False):
            for adapter, slot in slots.items():
                if target_map.filled.get(slot) != adapter:
                    fill_slot(manager.modules, slot, target_map.modules[adapter])
                    target_map.filled[slot] = adapter

    def memory(self, target: int) -> Tensor:
        """View a target in its adapter's slot, [elements] in the engine's dtype."""
        adapter, stack = self.target_map.stacks[target]
        return stack[self.slots[adapter]].view(-1)

    def complete(self, target: int) -> None:
        """Do nothing: kernels read the slot's memory directly."""

    @torch.no_grad()
    def finish(self) -> None:
        """Copy the factors that several targets share."""
        for first, other in self.target_map.duplicates:
            if self.target_map.stacks[other.target][0] in self.slots:
                source, copy = first.of(self.memory(first.target)), other.of(self.memory(other.target))
                copy.copy_(source)
                # what is computed with is compared with what was verified by checksum
                if not torch.equal(copy, source):
                    path, name, *_ = self.target_map.target_map.targets[other.target]
                    raise WeightSyncError(f"{path}.{name} differs from what was copied to it: restart this engine")


class AdapterWorkerExtension(WorkerExtension):
    """Methods of a worker that receive and activate adapters."""

    weight_transfer_engine: Any
    skyrl_slots: Mapping[str, int] = {}
    """Adapter → the slot that it was received into and that is not active yet."""
    skyrl_targets: AdapterTargetMap | None = None
    """The target map of :meth:`skyrl_record_adapter_targets`."""
    skyrl_sent_adapters: Sequence[str] = ()
    """The adapters of the last update with a reshard plan."""

    def skyrl_record_adapter_targets(self, tensors: list[list[Any]]) -> tuple[list[TargetTensor], bytes] | str:
        """Return the worker's target map for ``tensors`` (fields of :class:`TensorMeta`), or why it has none."""
        metadata = [metadata_of(*item) for item in tensors]
        try:
            self.skyrl_targets = record_adapter_targets(self._manager(), metadata)
        except ReshardUnsupported as error:
            return str(error)
        self.weight_transfer_engine.set_targets(self.skyrl_targets.target_map, metadata)
        return self.skyrl_targets.target_map.wire

    def skyrl_stage_adapters(self, senders: list[list[list[Any]]] | None) -> tuple[list[list[int]], Sequence[str]]:
        """Receive adapters into free slots. ``senders``: as in ``vllm_backend.UpdateInfo``; with a reshard plan, one
        list of all tensors.

        Returns the checksums of the buckets, per sender, and the projections that belong to no module of this worker.
        Raises WeightSyncError for an adapter that does not fit the engine.
        """
        self.skyrl_slots = {}
        try:
            routed = isinstance(self.weight_transfer_engine.receiver, SliceReceiver)
            self.skyrl_slots, sums, left = self._by_plan(senders) if routed else self._by_buckets(senders)
        except BaseException:
            # senders that wait for this worker get an error now instead of a timeout
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
        self.skyrl_targets = None  # its record of the slots' contents is stale
        for name, pairs in adapters.items():
            modules, unplaced = modules_of(manager, pairs)
            fill_slot(manager.modules, slots[name], modules)
            left += unplaced
        return slots, receiver.checksums, left

    def _by_plan(self, senders: list[list[list[Any]]] | None) -> tuple[dict[str, int], list[list[int]], Sequence[str]]:
        if senders is not None:
            named = (FactorName.parse(name).adapter for sender in senders for name, *_ in sender)
            self.skyrl_sent_adapters = list(dict.fromkeys(named))
        receiver, target_map = self.weight_transfer_engine.receiver, self.skyrl_targets
        assert target_map is not None, "a worker without a target map has no receive list"
        slots = self._free_slots(self.skyrl_sent_adapters)
        targets = SlotTargets(self._manager(), target_map, slots)
        device.mark()()  # received data are written on another stream
        of_tensor = [meta.adapter in slots for meta in target_map.tensors]
        receiver.receive(targets, [n for n, row in enumerate(receiver.transfers.buckets) if of_tensor[row[5]]])
        targets.finish()
        return slots, receiver.checksums, target_map.unplaced

    def _free_slots(self, names: Sequence[str]) -> dict[str, int]:
        held = self._manager().lora_index_to_id
        free = [slot for slot, number in enumerate(held) if number is None]
        if len(free) < len(names):
            raise WeightSyncError(
                f"{len(names)} adapters need free slots, but {len(free)} are free: slots hold {held}; raise "
                "generator.inference_engine.engine_init_kwargs.max_loras"
            )
        return dict(zip(names, free, strict=False))

    def skyrl_activate_adapters(self, numbers: dict[str, int]) -> list[int]:
        """Register the last received adapters, by name, under these ids; return the ids of all adapters in slots.
        Adapters that requests use are kept."""
        slots, self.skyrl_slots = self.skyrl_slots, {}
        if missing := [name or "the adapter" for name in numbers if name not in slots]:
            raise WeightSyncError(f"{', '.join(missing)} was not received: send an adapter before it is activated")
        manager = self._manager()
        for name, number in numbers.items():  # as LoRAModelManager.activate_adapter does
            manager._registered_adapters[number] = LoRAModel(number, 0, {})
            manager._active_adapters[number] = None
            manager.lora_index_to_id[slots[name]] = number
        return self._active()

    def skyrl_keep_adapters(self, numbers: list[int]) -> list[int]:
        """Drop received adapters that are not active, and all adapters except ``numbers``; return the ids in slots."""
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


if current_platform.is_cpu():
    choose_experts_with_adapters()
