"""A rank's model and optimizer state as blocks of global tensors.

Keys, global shapes and offsets are those of Megatron's ``sharded_state_dict()``: ``decoder.layers.…`` for weights,
``optimizer.state.{param,exp_avg,exp_avg_sq}.<weight's key>`` for the optimizer (its ``fully_reshardable`` format). A
rank saves the flat ranges that its distributed optimizer owns, of weights and moments. It loads whole weights and its
own ranges of the moments. Unlike Megatron's own function, nothing is gathered and nothing is copied.

A checkpoint stores boxes (offsets and sizes along every axis). A flat range of an n-dimensional tensor is at most
2n - 1 boxes, each contiguous within the range::

    boxes((4, 3), 2, 8)  →  [0, 2:3]   [1:2, 0:3]   [2, 0:2]

Every optimizer saves fp32 masters and unscaled moments, so that another optimizer can resume. States in fp32 or bf16
are stored from the optimizer's memory. FP16 and FP8 states are unscaled to fp32 in new host memory. So are masters of
which Transformer Engine keeps only the lower half (``store_param_remainders``). Such a master is a bf16 weight and an
int16 remainder, as integers ``master = weight · 2**16 + remainder``
(transformer_engine/common/multi_tensor/adam.cu subtracts one from the weight if the remainder is negative). A master
half-way between two weights that torch rounded down (to even) has no such remainder; the nearest representable value
is one unit in the last place away.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from bridges.tensor_names import EXPERTS, LAYERS
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.model.expert_placement import placement_of
from skyrl_megatron.runtime.model.local_weights import ADAPTERS

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block: ``offsets`` and ``sizes`` per axis, and ``start``, the index of its first element in the
    flattened tensor."""

    start: int
    offsets: Index
    sizes: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Index, start: int, stop: int, max_numel: int | None = None) -> Iterator[Box]:
    """Yield the fewest boxes that cover elements ``[start, stop)`` of a flattened tensor, in order.

    With ``max_numel`` a box has at most that many elements.
    """
    for box in _boxes(shape, start, stop, 0):
        yield from _split(box, max_numel) if max_numel else (box,)


def _boxes(shape: Index, start: int, stop: int, base: int) -> Iterator[Box]:
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield Box(base, (0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _within_row(shape, first, start - first * row, stop - first * row, base)
        return
    if start % row:
        yield from _within_row(shape, first, start - first * row, row, base)
        first += 1
    stop_row = stop // row
    if stop_row > first:
        rest = (0,) * (len(shape) - 1)
        yield Box(base + first * row, (first, *rest), (stop_row - first, *shape[1:]))
    if stop % row:
        yield from _within_row(shape, stop_row, 0, stop - stop_row * row, base)


def _within_row(shape: Index, index: int, start: int, stop: int, base: int) -> Iterator[Box]:
    for box in _boxes(shape[1:], start, stop, base + index * math.prod(shape[1:])):
        yield Box(box.start, (index, *box.offsets), (1, *box.sizes))


def _split(box: Box, max_numel: int) -> Iterator[Box]:
    """Split ``box`` into boxes of at most ``max_numel`` elements, along its first axis longer than 1."""
    if box.numel <= max_numel:
        yield box
        return
    # Along the first longer axis a piece stays contiguous in the flattened tensor.
    axis = next(i for i, size in enumerate(box.sizes) if size > 1)
    inner = math.prod(box.sizes[axis + 1 :])
    step = max(1, max_numel // inner)
    for begin in range(0, box.sizes[axis], step):
        count = min(step, box.sizes[axis] - begin)
        offsets = (*box.offsets[:axis], box.offsets[axis] + begin, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], count, *box.sizes[axis + 1 :])
        yield from _split(Box(box.start + begin * inner, offsets, sizes), max_numel)


_HALF = 1 << 16


def make_fused_state(adam: Any) -> None:
    """Initialise missing optimizer states as the first step would: zero moments, masters from the weights.

    Megatron's ``init_state_fn`` (megatron/core/optimizer/__init__.py) omits a required argument.
    """
    for group in adam.param_groups:
        for shard in group["params"]:
            if not adam.state[shard]:
                adam.initialize_state(shard, adam.store_param_remainders and shard.dtype == torch.bfloat16)


def fused_state(adam: Any, shard: Tensor) -> dict[str, Tensor]:
    """Return ``param`` and the moments of a ``shard`` [n], [n] each in fp32 or bf16, in the optimizer's own memory
    where possible."""
    tensors = {}
    for name in adam.state[shard]:
        state = adam.state[shard][name]
        if _is_remainder(name, state):
            tensors["param"] = join_master(shard, state).cpu()
        else:
            # bf16 states carry no scale, and unscaling would copy them to fp32.
            plain = adam.get_unscaled_state(shard, name, skip_unscale=state.dtype == torch.bfloat16)
            tensors["param" if name == "master_param" else name] = plain if plain is state else plain.cpu()
    return tensors


def write_back_fused(adam: Any, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Write the changed ``tensors``, [n] each, of :func:`fused_state` back. The weights in ``shard`` [n] must be
    loaded before."""
    for name, value in tensors.items():
        state_name = "master_param" if name == "param" else name
        state = adam.state[shard][state_name]
        if _is_remainder(state_name, state):
            state.copy_(remainder(shard, value.to(shard.device)))
        elif value.data_ptr() != state.data_ptr():
            adam.set_scaled_state(shard, state_name, value.to(shard.device))


def _is_remainder(name: str, state: Tensor) -> bool:
    return name == "master_param" and state.dtype == torch.int16


def join_master(weight: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 masters [n] of bf16 ``weight`` [n] and int16 remainders ``lower`` [n], in new memory."""
    bits = weight.detach().view(torch.int16).to(torch.int32)
    return bits.mul_(_HALF).add_(lower).view(torch.float32)


def remainder(weight: Tensor, master: Tensor) -> Tensor:
    """Return the int16 remainders [n] of fp32 ``master`` [n] relative to the bf16 ``weight`` [n] that it was rounded
    to."""
    bits = weight.detach().view(torch.int16).to(torch.int32).mul_(_HALF)
    # A tie rounded down does not fit into int16: the nearest value that does (see the top of the file).
    return torch.sub(master.view(torch.int32), bits).clamp_(-_HALF // 2, _HALF // 2 - 1).to(torch.int16)


@dataclass(slots=True)
class OwnedRange:
    """Elements ``[start, stop)`` of a flattened parameter that this rank's optimizer updates.

    ``tensors``: name → flat tensor of ``stop - start`` elements: ``param`` (fp32 master weight) and the moments.
    ``write_back``: stores changed tensors; None if they are the optimizer's own memory.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    sharded: bool
    """True if the ranks of the data-parallel group own different ranges; False if each holds the whole parameter."""
    write_back: Callable[[dict[str, torch.Tensor]], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeldRange:
    """Elements ``[start, stop)`` of a flattened parameter that this rank updates, and the tensor ``main`` that its
    optimizer updates: the master weights, or a view of the parameter."""

    parameter: Tensor
    main: Tensor
    start: int
    stop: int


def is_distributed(part: Any) -> bool:
    """Return whether the ranks of the data-parallel group own different ranges of this optimizer's parameters."""
    return hasattr(part, "gbuf_ranges")


def held_ranges(part: Any) -> Iterator[HeldRange]:
    """Yield every range of this rank, in any order, without its state."""
    if not is_distributed(part):
        for parameter, main in _main_parameters(part):
            yield HeldRange(parameter, main, 0, parameter.numel())
        return
    for parameter, (group, order) in part.model_param_group_index_map.items():
        main = part.optimizer.param_groups[group]["params"][order]
        # Private, but the only map from a parameter to its shard; Megatron's own checkpoints use it.
        interval = part._get_model_param_range_map(parameter)["param"]
        yield HeldRange(parameter, main, interval.start, interval.end)


def parameters_of(part: Any) -> Iterator[Tensor]:
    """Yield the parameters that the data-parallel ranks update together by this optimizer."""
    if is_distributed(part):
        for buffer in part.buffers:
            yield from buffer.param_index_map
    else:
        yield from (parameter for parameter, _ in _main_parameters(part))


def inner_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers of a rank: one for dense and one for expert parameters, if both exist."""
    if optimizer is None:
        return []
    # A rank without expert parameters, or without any trained one, has a stub in their place.
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def owned_ranges(optimizer: MegatronOptimizer | None) -> Iterator[OwnedRange]:
    """Yield every range of this rank. Missing moments (before the first step) are created as zeros."""
    for part in inner_optimizers(optimizer):
        if part.config.fp16:
            raise CheckpointError("checkpoints do not support fp16 with a loss scaler; train in bf16 or fp32")
        _make_state(part)
        if is_distributed(part):
            yield from _distributed(part)
        else:
            yield from _replicated(part)


def make_optimizer_state(optimizer: MegatronOptimizer | None) -> None:
    """Create missing moments (before the first step) as zeros."""
    for part in inner_optimizers(optimizer):
        _make_state(part)


def sharded_parameters(optimizer: MegatronOptimizer | None) -> set[int]:
    """Return ``id`` of every parameter whose optimizer state is sharded over the data-parallel group."""
    ids: set[int] = set()
    for part in inner_optimizers(optimizer):
        for buffer in getattr(part, "buffers", []):
            ids.update(id(parameter) for parameter in buffer.param_index_map)
    return ids


def _distributed(part: Any) -> Iterator[OwnedRange]:
    """Yield the ranges of a distributed optimizer (megatron/core/optimizer/distrib_optimizer.py), in its order."""
    # Bucket by bucket, as Megatron keeps the ranges; the order is the same on every start of a layout.
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    interval, write_back = ranges["param"], None
                    if _is_fused(part):
                        group, order = part.model_param_group_index_map[parameter]
                        shard = part.optimizer.param_groups[group]["params"][order]
                        tensors = fused_state(part.optimizer, shard)
                        write_back = functools.partial(write_back_fused, part.optimizer, shard)
                    else:
                        tensors = part._get_main_param_and_optimizer_states(parameter)
                        for repeated in ("step", "master_param"):  # HybridDeviceOptimizer's master is a duplicate
                            tensors.pop(repeated, None)
                    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
                    yield OwnedRange(parameter, interval.start, interval.end, flat, True, write_back)


def _replicated(part: Any) -> Iterator[OwnedRange]:
    """Yield the parameters of an optimizer that is not distributed. Each data-parallel rank holds the whole state."""
    for parameter, main in _main_parameters(part):
        state = part.optimizer.state[main]
        moments = {name: value for name, value in state.items() if torch.is_tensor(value) and name != "step"}
        tensors = {"param": main} | moments
        flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
        yield OwnedRange(parameter, 0, parameter.numel(), flat, False)


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (model parameter, tensor that the optimizer updates)."""
    # Megatron's optimizer of mixed precision; the one of fp32 trains the parameters themselves.
    if hasattr(part, "float16_groups"):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _make_state(part: Any) -> None:
    """Create zero moments for an optimizer that has not stepped. torch's Adam treats a non-empty state as complete, so
    it also gets a step count."""
    state = part.optimizer.state
    if all(state[p] for group in part.optimizer.param_groups for p in group["params"]):
        return
    if _is_hybrid(
        part
    ):  # has no init_state_fn (optimizer/__init__.py); its state mirrors that of the optimizers inside
        for inner in part.optimizer.sub_optimizers:
            _make_moments(inner)
        part.optimizer._sync_sub_optimizers_state_to_hdo()
    elif _is_fused(part):
        make_fused_state(part.optimizer)
    elif (make_own := getattr(part.optimizer, "make_state", None)) is not None:  # Muon, which has an Adam
        make_own()
        part.init_state_fn(part.optimizer.adam, part.config)
    else:
        part.init_state_fn(part.optimizer, part.config)
    for inner in _stepping(part):
        if _counts_per_parameter(inner):
            for p in _parameters(inner):
                inner.state[p].setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _make_moments(inner: torch.optim.Optimizer) -> None:
    for p in _parameters(inner):
        if not inner.state[p]:
            inner.state[p] |= {name: torch.zeros_like(p.data) for name in ("exp_avg", "exp_avg_sq")}


def _parameters(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def _is_hybrid(part: Any) -> bool:
    """Return whether it is Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``)."""
    return hasattr(part.optimizer, "sub_optimizers")


def _is_fused(part: Any) -> bool:
    """Return whether it is Transformer Engine's precision-aware Adam (``use_precision_aware_optimizer``)."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not _is_hybrid(part)


def _stepping(part: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that count steps: the inner ones of a hybrid optimizer, Adam within Muon."""
    if _is_hybrid(part):
        return list(part.optimizer.sub_optimizers)
    return [getattr(part.optimizer, "adam", part.optimizer)]


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """Return whether it counts steps per parameter, as torch's Adam does; Transformer Engine's and Apex's Adam count
    per group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def step_count(optimizer: MegatronOptimizer | None) -> int | None:
    """Return the optimizer steps taken; None if this rank holds no part of the optimizer. Raises CheckpointError if
    the counts of its parameters differ."""
    counts: set[int] = set()
    for inner in (inner for part in inner_optimizers(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            counts.update(int(inner.state[p]["step"]) for p in _parameters(inner))
        else:
            # A group without parameters on this rank never counts.
            counts.update(int(group.get("step", 0)) for group in inner.param_groups if group["params"])
    if len(counts) > 1:
        raise CheckpointError(f"the optimizer's parameters have taken different numbers of steps: {sorted(counts)}")
    return counts.pop() if counts else None


def set_step_count(optimizer: MegatronOptimizer | None, count: int) -> None:
    """Set the step count everywhere. torch's Adam gets a separate tensor per parameter: a shared tensor would be
    incremented once per parameter, which makes bias corrections wrong."""
    for inner in (inner for part in inner_optimizers(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            for p in _parameters(inner):
                inner.state[p]["step"] = torch.tensor(float(count), dtype=torch.float32)
        else:
            for group in inner.param_groups:
                group["step"] = count


@torch.no_grad()
def finish_load(optimizer: MegatronOptimizer | None) -> None:
    """Update a hybrid optimizer's host copies from the loaded masters. With a precision-aware optimizer the copies are
    the masters and are loaded already."""
    for part in inner_optimizers(optimizer):
        if _is_hybrid(part):
            for main, inner in part.optimizer.param_to_inner_param.items():
                if inner is not main and inner.dtype == main.dtype:
                    inner.copy_(main)


CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""Megatron's ``content_metadata`` of such a checkpoint."""
OPTIMIZER_PREFIX = "optimizer.state."
MOMENTUM = "momentum_buffer"
"""Name of Muon's only moment."""
BUCKET_BYTES = 64 * 2**20
"""Maximum size of a stored block. It limits host memory during a save from a GPU and during a load."""


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """A contiguous part of a local tensor that is a block of a global tensor.

    ``start``: its first element within the flattened local tensor. ``lead``: number of leading axes (layer, expert) of
    the global tensor; ``offsets`` and ``global_shape`` include them, ``shape`` does not.
    """

    key: str
    start: int
    shape: Index
    lead: int
    offsets: Index
    global_shape: Index
    replica: Index
    """Index among the ranks that hold the same block; the last entry is the data-parallel index."""
    flexible: bool
    """The global shape may differ from the stored one (a vocabulary padded to another multiple)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a global tensor and this rank's memory for it: ``data`` is flat and contiguous."""

    key: str
    global_shape: Index
    offsets: Index
    sizes: Index
    data: torch.Tensor
    flexible: bool = False


def unwrapped(chunk: Any) -> Any:
    """Return the model inside of DDP and precision wrappers. A checkpoint uses its keys."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def local_blocks(chunks: Iterable[Any], groups: ProcessGroups) -> list[tuple[torch.Tensor, list[LocalBlock]]]:
    """Return every tensor of this rank's model chunks with its blocks, without the layers' ``_extra_state``. If
    adapters are trained, only their tensors: the base does not change."""
    blocks: list[tuple[torch.Tensor, list[LocalBlock]]] = []
    for chunk in chunks:
        model = unwrapped(chunk)
        state = getattr(model, ADAPTERS, model).sharded_state_dict(metadata=CONTENT | {"dp_cp_group": groups.dp_cp})
        for entry in nested_values(state):
            if isinstance(entry, ShardedObject):
                if not entry.key.endswith("_extra_state"):
                    raise CheckpointError(f"{entry.key} is an object of the model; only tensors can be saved")
                continue
            built = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
            blocks.append((entry.data, [_piece(part, entry.data, placement_of(model)) for part in built]))
    return blocks


def _piece(part: ShardedTensor, tensor: torch.Tensor, placement: ExpertPlacement | None) -> LocalBlock:
    # Offsets are computed from storage positions, which only contiguous tensors have.
    if not (part.data.is_contiguous() and tensor.is_contiguous()):
        raise CheckpointError(f"{part.key} is not contiguous in memory and cannot be saved")
    replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
    return LocalBlock(
        key=part.key,
        start=part.data.storage_offset() - tensor.storage_offset(),
        shape=tuple(part.local_shape),
        lead=part.prepend_axis_num,
        offsets=_by_expert(part, placement),
        global_shape=tuple(part.global_shape),
        replica=replica,
        flexible=part.allow_shape_mismatch,
    )


def _by_expert(part: ShardedTensor, placement: ExpertPlacement | None) -> Index:
    """Return the offsets of a tensor, with the number of an expert where Megatron has that of its slot."""
    offsets, axis = tuple(part.global_offset), part.prepend_axis_num - 1
    if placement is None or not placement.moved or axis < 0 or f".{EXPERTS}" not in part.key:
        return offsets
    if not part.key.startswith(LAYERS):  # of a draft head
        return offsets
    # Stacked layers have a leading axis of layers; a layer by itself has its number in the key.
    layer = offsets[0] if axis else int(part.key.removeprefix(LAYERS).partition(".")[0])
    return (*offsets[:axis], placement.slots(layer)[offsets[axis]], *offsets[axis + 1 :])


def blocks_to_save(
    chunks: Iterable[Any], optimizer: MegatronOptimizer | None, groups: ProcessGroups
) -> Iterator[Block]:
    """Yield the blocks that this rank writes. The blocks of all ranks cover every global tensor exactly once.

    ``data`` are views of weights and moments, at most :data:`BUCKET_BYTES` each; no memory is allocated.
    """
    chunks = list(chunks)
    placement = placement_of(unwrapped(chunks[0])) if chunks else None
    if placement is not None and placement.moving:
        raise CheckpointError("a move of experts failed: the weights of this process cannot be saved; start again")
    owned = {id(held.parameter): held for held in owned_ranges(optimizer)}
    spread = sharded_parameters(optimizer)
    for tensor, pieces in local_blocks(chunks, groups):
        updated = owned.get(id(tensor))
        if any(pieces[0].replica[:-1]):
            continue  # another tp or pp rank writes it
        if id(tensor) in spread:
            # What the rank updates it also writes: no gather, and every rank writes equally much.
            start, stop = (updated.start, updated.stop) if updated else (0, 0)
        else:
            start, stop = _share(tensor, pieces[0].replica[-1], groups)
        weight = tensor.detach().view(-1)[start:stop]
        yield from _blocks(pieces, weight, start, stop, "")
        if updated is not None:
            for name, state in updated.tensors.items():
                flat = state[start - updated.start : stop - updated.start]
                yield from _blocks(pieces, flat, start, stop, f"{OPTIMIZER_PREFIX}{name}.")


def _share(tensor: torch.Tensor, index: int, groups: ProcessGroups) -> tuple[int, int]:
    """Return the equal part (start, stop) of a replicated tensor that data-parallel rank ``index`` writes."""
    # Experts are replicated over edp, which has fewer ranks than dp·cp.
    is_expert = not getattr(tensor, "allreduce", True)
    count = (groups.edp if is_expert else groups.dp_cp).size()
    return tensor.numel() * index // count, tensor.numel() * (index + 1) // count


def blocks_to_load(chunks: Iterable[Any], ranges: Iterable[OwnedRange], groups: ProcessGroups) -> Iterator[Block]:
    """Yield the blocks that this rank loads: every weight that it holds, and ``ranges`` of the optimizer."""
    owned = {id(held.parameter): held for held in ranges}
    for tensor, pieces in local_blocks(chunks, groups):
        yield from _blocks(pieces, tensor.detach().view(-1), 0, tensor.numel(), "")
        updated = owned.get(id(tensor))
        if updated is not None:
            for name, state in updated.tensors.items():
                yield from _blocks(pieces, state, updated.start, updated.stop, f"{OPTIMIZER_PREFIX}{name}.")


def _blocks(pieces: list[LocalBlock], flat: torch.Tensor, start: int, stop: int, prefix: str) -> Iterator[Block]:
    """Split ``flat``, elements ``[start, stop)`` of the local tensor that ``pieces`` describe, into blocks."""
    limit = BUCKET_BYTES // flat.element_size()
    for piece in pieces:
        begin, end = max(start, piece.start), min(stop, piece.start + piece.numel)
        for box in boxes(piece.shape, begin - piece.start, end - piece.start, limit):
            begin_of_box = piece.start + box.start - start
            local = (0,) * piece.lead + box.offsets
            yield Block(
                key=prefix + piece.key,
                global_shape=piece.global_shape,
                offsets=tuple(a + b for a, b in zip(piece.offsets, local, strict=True)),
                sizes=(1,) * piece.lead + box.sizes,
                data=flat[begin_of_box : begin_of_box + box.numel],
                flexible=piece.flexible,
            )
