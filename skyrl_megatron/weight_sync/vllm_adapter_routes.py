"""Routes of adapters into the slots of vLLM 0.32: which part of which factor its modules copy where.

A module's own ``set_lora`` is run with factors that have no memory. What it would copy of them is the route, and goes
into the memory of a free slot as it arrives; the rest of it, zeros and flags, is done before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.rectangles import Rectangle, merged, rectangles, width_of
from skyrl_megatron.weight_sync.routes import FilledTensor, Route, Unroutable
from skyrl_megatron.weight_sync.source import dtype_name
from skyrl_megatron.weight_sync.vllm_adapter_modules import Modules, fill_slot, modules_of, pairs_of

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
