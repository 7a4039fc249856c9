"""Experts that change their expert-parallel rank between optimizer steps.

After the last optimizer step of a batch every rank makes the same plan (``experts/plan.py``) from the loads
of that batch. Weights, master weights and moments of the experts then go from rank to rank, and
:class:`ExpertPlacement` gets the new slots. If adapters are trained, these are the frozen weights, and the factors of
all adapters with their optimizers' states. Results differ only in the order in which a token's experts, and the
squares of the gradient norm, are summed.

A slot of a layer is an equal part of the same parameters on every expert-parallel rank. The distributed optimizer
splits a parameter's masters and moments over the ``edp`` ranks at places that do not depend on slots, so a part may
come from several ranks. Messages take a window of all slots at a time, which bounds the memory for what arrives.

A move is never half saved: until it is complete a checkpoint of this process raises CheckpointError, and the next
start loads the last checkpoint or peer checkpoint, which has weights and slots of one moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.errors import DistributedError
from skyrl_megatron.runtime.checkpoint.rank_state import OwnedRange, owned_ranges
from skyrl_megatron.runtime.flops import device_type
from skyrl_megatron.runtime.hf_weights import load_again
from skyrl_megatron.runtime.model.local_weights import weight_locations
from skyrl_megatron.runtime.parts import PartSetup, RankPart
from skyrl_megatron_lora.attach import Adapters
from skyrl_megatron_lora.folder import factors_of_experts
from skyrl_megatron_parts.experts.plan import Freedom, LayerPlan, MoveCosts, plan_moves

if TYPE_CHECKING:
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.optimizer import TrainingState
    from skyrl_megatron.runtime.parallel_state import ProcessGroups

WINDOW_BYTES = 64 * 2**20
"""Most memory for parts that arrive at the same time."""

type Elements = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Slot:
    """One expert's part of a parameter: the elements from ``first`` of the flattened parameter."""

    parameter: Tensor
    first: int


@dataclass(frozen=True, slots=True)
class _SlotTensor:
    """One tensor of the experts of a layer: this rank's slots in order, each with ``numel`` elements."""

    layer: int
    slots: list[_Slot]
    numel: int


@dataclass(frozen=True, slots=True)
class _Route:
    """An expert's way: from a slot of an expert-parallel rank to a slot of another one."""

    source: int
    source_slot: int
    target: int
    target_slot: int


class ExpertMoves(RankPart):
    """Plans and makes the moves of a trained model's experts (``moe_expert_moves``).

    ``shuffle`` moves at random after every batch, which changes no result and is a test.
    """

    name = "expert_moves"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether the experts of a trained role are spread over ranks and may move."""
        asked = setup.settings.megatron_config.moe_expert_moves != "none" and not is_frozen(setup.role)
        return asked and setup.groups.ep.size() > 1 and bool(setup.model.config.num_moe_experts)

    def __init__(self, setup: PartSetup) -> None:
        super().__init__(setup)
        self.model, self.groups = setup.model, setup.groups
        self.shuffle = setup.settings.megatron_config.moe_expert_moves == "shuffle"
        self.placement = self.model.experts
        self.placement.movable = True
        self.adapters: list[Adapters] = []
        """Those that are trained in place of the weights."""
        self._loads: dict[int, Tensor] = {}
        self._places: list[list[int]] | None = None

    def prepared(self, trained: Mapping[str, TrainingState]) -> None:
        """Note what moves with the experts, and what a move costs."""
        model, groups = self.model, self.groups
        self.adapters = [state.adapters for state in trained.values() if isinstance(state.adapters, Adapters)]
        if self.adapters:
            self.placement.load_frozen = partial(load_again, model, groups)
        config = model.config
        grouped = config.moe_router_num_groups if config.moe_router_group_topk else None
        self.freedom = Freedom.of(self.placement.experts, self.placement.ranks, grouped)
        self.costs = MoveCosts.of(
            config.hidden_size,
            int(config.moe_ffn_hidden_size or 0),
            weight_bytes=config.params_dtype.itemsize,
            edp=groups.edp.size(),
            etp=groups.etp.size(),
            gpu=device_type(),
            flops=self.setup.cfg.trainer.peak_flops_per_rank,
            frozen=bool(self.adapters),
        )

    def end_pass(self, loads: Mapping[int, Tensor]) -> dict[str, float]:
        """Count the tokens of each expert, [E] float64 by layer, for the next plan."""
        for layer, load in loads.items():
            self._loads[layer] = self._loads[layer] + load if layer in self._loads else load
        return {}

    def end_batch(self, trained: Mapping[str, TrainingState], steps: int) -> dict[str, float]:
        """Plan by the loads since the last call and move. Return the metrics of the moves.

        ``moe_rank_imbalance``: tokens of the busiest expert-parallel rank over the mean, averaged over layers;
        ``moe_rank_imbalance_moved``: that of the same tokens after the moves; ``moe_moved_experts``: experts of all
        layers that changed their slot; ``moe_move_s``: seconds. {} if no token was counted.
        """
        loads = {layer: load.tolist() for layer, load in self._loads.items()}
        self._loads = {}
        if not loads:
            return {}
        began = time.perf_counter()
        slots = {layer: self.placement.slots(layer) for layer in loads}
        shuffle = steps if self.shuffle else None
        plans = plan_moves(loads, slots, self.placement.ranks, self.freedom, self.costs, shuffle=shuffle)
        moved = {layer: plan.slots for layer, plan in plans.items() if plan.moved}
        if moved:
            self.move([state.optimizer for state in trained.values()], moved)
        return _metrics(list(plans.values())) | {"moe_move_s": time.perf_counter() - began}

    @torch.no_grad()
    def move(self, optimizers: Sequence[Any], target: Mapping[int, Sequence[int]]) -> None:
        """Move weights and optimizer states of this rank's experts to the slots of ``target``. Every rank calls it.

        Gradients must be cleared before. Raises an error of torch.distributed if a rank is gone.
        """
        self.placement.moving = True
        tensors = list(_slot_tensors(self.model, self.groups, target, self.adapters))
        owned = {
            id(owned_range.parameter): owned_range
            for optimizer in optimizers
            for owned_range in owned_ranges(optimizer)
        }
        held = self._held_spans(tensors, owned)
        touched: dict[int, OwnedRange] = {}
        for number, tensor in enumerate(tensors):
            routes = list(_routes(self.placement.slots(tensor.layer), target[tensor.layer], self.placement.per_rank))
            all_spans = [[(0, tensor.numel)] * len(tensor.slots)] * self.groups.edp.size()
            weights = [_Flat(slot.parameter.data.view(-1), 0, slot.first) for slot in tensor.slots]
            self._exchange(routes, tensor.numel, weights, all_spans, paired=True)
            ranges = [owned.get(id(slot.parameter)) for slot in tensor.slots]
            for name in sorted(
                {name for owned_range in ranges if owned_range is not None for name in owned_range.tensors}
            ):
                states = [
                    _state(name, slot, owned_range) for slot, owned_range in zip(tensor.slots, ranges, strict=True)
                ]
                pairs = zip(states, tensor.slots, strict=True)
                if any(state is not None and state.is_view_of(slot.parameter) for state, slot in pairs):
                    continue  # fp32 weights are their own masters
                sharded = any(owned_range is not None and owned_range.sharded for owned_range in ranges)
                spans = held[number] if sharded else all_spans
                self._exchange(routes, tensor.numel, states, spans, paired=not sharded)
            touched |= {id(owned_range): owned_range for owned_range in ranges if owned_range is not None}
        for owned_range in touched.values():
            if owned_range.write_back is not None:
                owned_range.write_back(owned_range.tensors)
        self.placement.set(dict(self.placement.moved) | dict(target))

    def _held_spans(
        self, tensors: Sequence[_SlotTensor], owned: Mapping[int, OwnedRange]
    ) -> list[list[list[Elements]]]:
        """Return the elements of each slot whose state a rank owns: [tensor][edp rank][slot].

        Raises DistributedError if expert-parallel ranks own different elements.
        """
        own_spans = [
            [_span(slot, tensor.numel, owned.get(id(slot.parameter))) for slot in tensor.slots] for tensor in tensors
        ]
        replicas: list[Any] = [None] * self.groups.edp.size()
        dist.all_gather_object(replicas, own_spans, group=self.groups.edp)
        everyone: list[Any] = [None] * self.groups.ep.size()
        here = (dist.get_process_group_ranks(self.groups.edp), replicas)
        dist.all_gather_object(everyone, here, group=self.groups.ep)
        if any(spans != replicas for _, spans in everyone):
            raise DistributedError("expert-parallel ranks split the state of their experts differently: a bug")
        self._places = [ranks for ranks, _ in everyone]
        return [[replica[number] for replica in replicas] for number in range(len(tensors))]

    def _exchange(
        self,
        routes: Sequence[_Route],
        numel: int,
        slots: Sequence[_Flat | None],
        spans: Sequence[Sequence[Elements]],
        *,
        paired: bool,
    ) -> None:
        """Exchange one tensor of the slots. ``spans``: [edp rank][slot], the elements that a rank has. ``paired``:
        every rank has all elements, and gets them from the rank with its place in edp."""
        assert self._places is not None
        here = dist.get_rank()
        width = next((slot.data.element_size() for slot in slots if slot is not None), 1)
        window = max(1, WINDOW_BYTES // width // len(slots))
        for begin in range(0, numel, window):
            works: list[Any] = []
            arriving: list[tuple[Tensor, Tensor]] = []
            for route in routes:
                for to, wanted in enumerate(spans):
                    for source, offered in enumerate(spans):
                        if paired and to != source:
                            continue
                        low = max(begin, wanted[route.target_slot][0], offered[route.source_slot][0])
                        high = min(begin + window, wanted[route.target_slot][1], offered[route.source_slot][1])
                        sender, receiver = self._places[route.source][source], self._places[route.target][to]
                        if low >= high or here not in (sender, receiver):
                            continue
                        part = target = None
                        if here == sender:
                            part = _part(slots[route.source_slot], low, high)
                        if here == receiver:
                            target = _part(slots[route.target_slot], low, high)
                        if part is not None and target is not None:
                            arriving.append((target, part.clone()))
                        elif part is not None:
                            works.append(dist.P2POp(dist.isend, part, receiver))
                        elif target is not None:
                            buffer = torch.empty_like(target)
                            works.append(dist.P2POp(dist.irecv, buffer, sender))
                            arriving.append((target, buffer))
            for work in dist.batch_isend_irecv(works) if works else ():
                work.wait()
            device.synchronize()
            for target, buffer in arriving:
                target.copy_(buffer)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A flat tensor with element ``first`` of a parameter's slot at ``first - start``."""

    data: Tensor
    start: int
    first: int

    def is_view_of(self, parameter: Tensor) -> bool:
        """Return whether the elements are the parameter's own memory."""
        begin, place = parameter.data_ptr(), self.data.data_ptr()
        return begin <= place < begin + parameter.nbytes


def _part(slot: _Flat | None, low: int, high: int) -> Tensor:
    """Return elements ``[low, high)`` of a slot as a view."""
    assert slot is not None
    place = slot.first - slot.start
    return slot.data[place + low : place + high]


def _state(name: str, slot: _Slot, own: OwnedRange | None) -> _Flat | None:
    return None if own is None else _Flat(own.tensors[name], own.start, slot.first)


def _span(slot: _Slot, numel: int, own: OwnedRange | None) -> Elements:
    """Return the elements of a slot that this rank's optimizer has; (0, 0) for none."""
    if own is None:
        return 0, 0
    low, high = max(own.start - slot.first, 0), min(own.stop - slot.first, numel)
    return (low, high) if low < high else (0, 0)


def _slot_tensors(
    model: ModelChunks, groups: ProcessGroups, layers: Mapping[int, Sequence[int]], adapters: Iterable[Adapters] = ()
) -> Iterator[_SlotTensor]:
    """Yield the tensors of these layers' experts in module order, which is the same on all expert-parallel ranks."""
    rank = groups.ep.rank()
    by_tensor: dict[Any, dict[int, _Slot]] = {}
    sizes: dict[Any, int] = {}
    key: tuple[Any, ...]
    for location in weight_locations(model, groups):
        for entry in location.weights.values():
            if entry.expert is None or entry.layer_number not in layers:
                continue
            number = model.experts.held(entry.layer_number, rank).index(entry.expert)
            key = (entry.layer_number, entry.bound.row.megatron)
            sizes[key] = location.parameter.numel() // len(location.weights)
            first = number * sizes[key] if len(location.weights) > 1 else 0
            by_tensor.setdefault(key, {})[number] = _Slot(location.parameter, first)
    for adapter_set in adapters:
        for layer, factor in factors_of_experts(adapter_set):
            if layer not in layers:
                continue
            key = (layer, factor.name, id(adapter_set))
            for part, (expert, matrix) in enumerate(factor.matrices()):
                sizes[key] = matrix.numel()
                number = model.experts.held(layer, rank).index(expert)
                by_tensor.setdefault(key, {})[number] = _Slot(factor.tensor, part * sizes[key])
    for key, slots in by_tensor.items():
        yield _SlotTensor(key[0], [slot for _, slot in sorted(slots.items())], sizes[key])


def _routes(before: Sequence[int], after: Sequence[int], per_rank: int) -> Iterator[_Route]:
    """Yield the ways of a layer's experts, by the slots where they arrive."""
    homes = {expert: slot for slot, expert in enumerate(before)}
    for slot, expert in enumerate(after):
        home = homes[expert]
        if home != slot:
            yield _Route(*divmod(home, per_rank), *divmod(slot, per_rank))


def _metrics(plans: Sequence[LayerPlan]) -> dict[str, float]:
    return {
        "moe_rank_imbalance": sum(plan.before for plan in plans) / len(plans),
        "moe_rank_imbalance_moved": sum(plan.after for plan in plans) / len(plans),
        "moe_moved_experts": float(sum(plan.moved for plan in plans)),
    }
