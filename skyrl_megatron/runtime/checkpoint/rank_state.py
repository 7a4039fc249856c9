"""What a rank holds of a model and its optimizer, as blocks of global tensors.

A distributed optimizer owns a flat range of a parameter. A checkpoint stores boxes (offsets and sizes along every
axis). A range over an n-dimensional tensor is at most 2n - 1 boxes, each of them contiguous within the range::

    boxes((4, 3), 2, 8)  →  [0, 2:3]   [1:2, 0:3]   [2, 0:2]

A checkpoint has fp32 masters and unscaled moments whichever optimizer saves it, so that another can go on. What this
one keeps in fp32 or bf16 is stored from its own memory. FP16 and FP8 states are unscaled to fp32 first, and masters of
which it keeps the lower half alone (``store_param_remainders``) are put together; both lie in new memory on the host.

An fp32 master is then a bf16 weight, its upper half rounded, and an int16 remainder: as integers,
``master = weight · 2**16 + remainder`` (transformer_engine/common/multi_tensor/adam.cu, which takes one off the weight
where the remainder is negative). A master half-way between two weights that was rounded down, as torch rounds to even,
has no such remainder; the nearest is one unit in its last place away.

Megatron's own ``sharded_state_dict`` gathers whole buffers of the distributed optimizer on every rank. Here each rank
sees its own flat ranges in place: nothing is gathered, nothing is copied.

Keys, global shapes and offsets are those of Megatron's ``sharded_state_dict()``: ``decoder.layers.…`` for weights and
``optimizer.state.{param,exp_avg,exp_avg_sq}.<weight's key>`` for the optimizer, the names of its
``fully_reshardable`` format. A rank saves the flat ranges that its distributed optimizer owns, weights and moments
alike, cut into boxes; it loads whole weights and its own ranges of the moments.
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

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.model.local_weights import ADAPTERS

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from skyrl_megatron.runtime.parallel_state import ProcessGroups


Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block: ``offsets`` and ``sizes`` per axis, ``start``: position of its first element when the
    tensor is flattened in row-major order."""

    start: int
    offsets: Index
    sizes: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Index, start: int, stop: int, max_numel: int | None = None) -> Iterator[Box]:
    """Yield the fewest boxes that make up elements ``[start, stop)`` of a flattened tensor, in order.

    With ``max_numel`` each box has at most so many elements.
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
    whole = stop // row
    if whole > first:
        rest = (0,) * (len(shape) - 1)
        yield Box(base + first * row, (first, *rest), (whole - first, *shape[1:]))
    if stop % row:
        yield from _within_row(shape, whole, 0, stop - whole * row, base)


def _within_row(shape: Index, index: int, start: int, stop: int, base: int) -> Iterator[Box]:
    for box in _boxes(shape[1:], start, stop, base + index * math.prod(shape[1:])):
        yield Box(box.start, (index, *box.offsets), (1, *box.sizes))


def _split(box: Box, max_numel: int) -> Iterator[Box]:
    """Cut ``box`` into pieces of at most ``max_numel`` elements, cut along its first axis longer than 1."""
    if box.numel <= max_numel:
        yield box
        return
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
    """Make the state of parameters that have none, as its first step would: moments of zeros, masters of the weights.

    Megatron's ``init_state_fn`` (megatron/core/optimizer/__init__.py) leaves out an argument that it has to be given.
    """
    for group in adam.param_groups:
        for shard in group["params"]:
            if not adam.state[shard]:
                adam.initialize_state(shard, adam.store_param_remainders and shard.dtype == torch.bfloat16)


def fused_state(adam: Any, shard: Tensor) -> dict[str, Tensor]:
    """Return ``param`` and the moments, of fp32 or bf16, in the optimizer's own memory where it holds them so."""
    found = {}
    for name in adam.state[shard]:
        state = adam.state[shard][name]
        if _is_remainder(name, state):
            found["param"] = joined(shard, state).cpu()
        else:
            plain = adam.get_unscaled_state(shard, name, skip_unscale=state.dtype == torch.bfloat16)
            found["param" if name == "master_param" else name] = plain if plain is state else plain.cpu()
    return found


def put_back_fused(adam: Any, shard: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Take the changed ``tensors`` of :func:`fused_state` into the state. The weights in ``shard`` must be loaded."""
    for name, value in tensors.items():
        state_name = "master_param" if name == "param" else name
        state = adam.state[shard][state_name]
        if _is_remainder(state_name, state):
            state.copy_(remainder(shard, value.to(shard.device)))
        elif value.data_ptr() != state.data_ptr():
            adam.set_scaled_state(shard, state_name, value.to(shard.device))


def _is_remainder(name: str, state: Tensor) -> bool:
    return name == "master_param" and state.dtype == torch.int16


def joined(weight: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 ``weight`` and int16 remainders ``lower``, in new memory."""
    bits = weight.detach().view(torch.int16).to(torch.int32)
    return bits.mul_(_HALF).add_(lower).view(torch.float32)


def remainder(weight: Tensor, master: Tensor) -> Tensor:
    """Return the int16 remainders that make fp32 ``master`` of the bf16 ``weight`` that it was rounded to."""
    bits = weight.detach().view(torch.int16).to(torch.int32).mul_(_HALF)
    return torch.sub(master.view(torch.int32), bits).clamp_(-_HALF // 2, _HALF // 2 - 1).to(torch.int16)


@dataclass(slots=True)
class OwnedRange:
    """Elements ``[start, stop)`` of a flattened parameter, which this rank's optimizer updates.

    ``tensors``: name → flat tensor of ``stop - start`` elements: ``param`` (fp32 master weight) and the moments.
    ``put_back`` is None when they are the optimizer's own memory, else a function that stores changed ones.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    sharded: bool
    """True when the ranks of the data-parallel group own different ranges; False when each holds the whole."""
    put_back: Callable[[dict[str, torch.Tensor]], None] | None = None


def parts(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers of a rank: one for dense and one for expert parameters, where both exist."""
    if optimizer is None:
        return []
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def owned_ranges(optimizer: MegatronOptimizer | None) -> Iterator[OwnedRange]:
    """Yield every range of this rank. Moments that do not exist before the first step are made, as zeros."""
    for part in parts(optimizer):
        if part.config.fp16:
            raise CheckpointError("fp16 with a loss scaler is not checkpointed; train in bf16 or fp32")
        _make_state(part)
        if hasattr(part, "gbuf_ranges"):
            yield from _distributed(part)
        else:
            yield from _replicated(part)


def make_optimizer_state(optimizer: MegatronOptimizer | None) -> None:
    """Make moments that do not exist before the first step, as zeros."""
    for part in parts(optimizer):
        _make_state(part)


def sharded_parameters(optimizer: MegatronOptimizer | None) -> set[int]:
    """Return ``id`` of every parameter whose optimizer state is spread over the data-parallel group."""
    found: set[int] = set()
    for part in parts(optimizer):
        for buffer in getattr(part, "buffers", []):
            found.update(id(parameter) for parameter in buffer.param_index_map)
    return found


def _distributed(part: Any) -> Iterator[OwnedRange]:
    """Yield ranges of megatron/core/optimizer/distrib_optimizer.py, in its order."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    place, put_back = ranges["param"], None
                    if _is_fused(part):
                        group, order = part.model_param_group_index_map[parameter]
                        shard = part.optimizer.param_groups[group]["params"][order]
                        tensors = fused_state(part.optimizer, shard)
                        put_back = functools.partial(put_back_fused, part.optimizer, shard)
                    else:
                        tensors = part._get_main_param_and_optimizer_states(parameter)
                        for repeated in ("step", "master_param"):  # HybridDeviceOptimizer's is the same again
                            tensors.pop(repeated, None)
                    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
                    yield OwnedRange(parameter, place.start, place.end, flat, True, put_back)


def _replicated(part: Any) -> Iterator[OwnedRange]:
    """Yield parameters of an optimizer that is not distributed: each data-parallel rank holds the whole state."""
    for parameter, main in _main_parameters(part):
        state = part.optimizer.state[main]
        moments = {name: value for name, value in state.items() if torch.is_tensor(value) and name != "step"}
        tensors = {"param": main} | moments
        flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
        yield OwnedRange(parameter, 0, parameter.numel(), flat, False)


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, the tensor that the optimizer updates)."""
    if hasattr(part, "float16_groups"):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from zip(group, group, strict=True)
    else:
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)


def _make_state(part: Any) -> None:
    """Zero moments for an optimizer that has not stepped. torch's Adam takes a state as complete when it is not
    empty, so it gets its step count too."""
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
    """Tell whether it is Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``)."""
    return hasattr(part.optimizer, "sub_optimizers")


def _is_fused(part: Any) -> bool:
    """Tell whether it is Transformer Engine's precision-aware Adam (``use_precision_aware_optimizer``)."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not _is_hybrid(part)


def _stepping(part: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that count steps: those inside a hybrid one, whose own groups count none."""
    return list(part.optimizer.sub_optimizers) if _is_hybrid(part) else [part.optimizer]


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam keeps a step per parameter; Transformer Engine's and Apex's keep one per group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def step_count(optimizer: MegatronOptimizer | None) -> int | None:
    """Optimizer steps taken; None when this rank holds no part of the optimizer. Raises CheckpointError when the
    counts of its parameters differ."""
    counts: set[int] = set()
    for inner in (inner for part in parts(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            counts.update(int(inner.state[p]["step"]) for p in _parameters(inner))
        else:
            counts.update(int(group.get("step", 0)) for group in inner.param_groups if group["params"])
    if len(counts) > 1:
        raise CheckpointError(f"the optimizer's parameters have taken different numbers of steps: {sorted(counts)}")
    return counts.pop() if counts else None


def set_step_count(optimizer: MegatronOptimizer | None, count: int) -> None:
    """Set the count everywhere. torch's Adam gets a tensor of its own per parameter: one shared tensor would be
    counted up once per parameter, and every bias correction after it would be wrong."""
    for inner in (inner for part in parts(optimizer) for inner in _stepping(part)):
        if _counts_per_parameter(inner):
            for p in _parameters(inner):
                inner.state[p]["step"] = torch.tensor(float(count), dtype=torch.float32)
        else:
            for group in inner.param_groups:
                group["step"] = count


@torch.no_grad()
def finish_load(optimizer: MegatronOptimizer | None) -> None:
    """Let a hybrid optimizer's copies on the host follow the masters that were loaded. Where it is precision-aware,
    the copies are the masters and were filled themselves."""
    for part in parts(optimizer):
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
BUCKET_BYTES = 64 * 2**20
"""Largest block that is stored in one piece: bounds host memory while saving from a GPU and while loading."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a local tensor that is a block of a global tensor.

    ``start``: its first element within the flattened local tensor. ``lead``: number of axes (layer, expert) that the
    global tensor has in front; ``offsets`` and ``global_shape`` include them, ``shape`` does not.
    """

    key: str
    start: int
    shape: Index
    lead: int
    offsets: Index
    global_shape: Index
    replica: Index
    """Position among the ranks that hold the same block; the last entry counts along data parallelism."""
    flexible: bool
    """The global shape may differ from the stored one (a vocabulary padded to another multiple)."""

    @property
    def numel(self) -> int:
        """Elements of the piece."""
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
    """Return the model inside of DDP and precision wrappers, whose keys a checkpoint has."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def local_pieces(chunks: Iterable[Any], groups: ProcessGroups) -> list[tuple[torch.Tensor, list[Piece]]]:
    """Return every tensor of this rank's model chunks with its pieces; where adapters are trained, those of adapters
    alone: their base stays as its folder has it. ``_extra_state`` of layers is left out."""
    found: list[tuple[torch.Tensor, list[Piece]]] = []
    for chunk in chunks:
        model = unwrapped(chunk)
        state = getattr(model, ADAPTERS, model).sharded_state_dict(metadata=CONTENT | {"dp_cp_group": groups.dp_cp})
        for entry in nested_values(state):
            if isinstance(entry, ShardedObject):
                if not entry.key.endswith("_extra_state"):
                    raise CheckpointError(f"{entry.key}: the model keeps an object there, only tensors can be saved")
                continue
            built = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
            found.append((entry.data, [_piece(part, entry.data) for part in built]))
    return found


def _piece(part: ShardedTensor, whole: torch.Tensor) -> Piece:
    if not (part.data.is_contiguous() and whole.is_contiguous()):
        raise CheckpointError(f"{part.key}: a block that is not contiguous in memory cannot be saved")
    replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
    return Piece(
        key=part.key,
        start=part.data.storage_offset() - whole.storage_offset(),
        shape=tuple(part.local_shape),
        lead=part.prepend_axis_num,
        offsets=tuple(part.global_offset),
        global_shape=tuple(part.global_shape),
        replica=replica,
        flexible=part.allow_shape_mismatch,
    )


def blocks_to_save(
    chunks: Iterable[Any], optimizer: MegatronOptimizer | None, groups: ProcessGroups
) -> Iterator[Block]:
    """Yield the blocks that this rank writes. Over all ranks they cover every global tensor exactly once.

    No memory is taken: ``data`` are views of weights and moments, at most :data:`BUCKET_BYTES` each.
    """
    owned = {id(each.parameter): each for each in owned_ranges(optimizer)}
    spread = sharded_parameters(optimizer)
    for tensor, pieces in local_pieces(chunks, groups):
        mine = owned.get(id(tensor))
        if any(pieces[0].replica[:-1]):
            continue  # another tp or pp rank writes it
        if id(tensor) in spread:
            start, stop = (mine.start, mine.stop) if mine else (0, 0)
        else:
            start, stop = _share(tensor, pieces[0].replica[-1], groups)
        weight = tensor.detach().view(-1)[start:stop]
        yield from _blocks(pieces, weight, start, stop, "")
        if mine is not None:
            for name, state in mine.tensors.items():
                flat = state[start - mine.start : stop - mine.start]
                yield from _blocks(pieces, flat, start, stop, f"{OPTIMIZER_PREFIX}{name}.")


def _share(tensor: torch.Tensor, index: int, groups: ProcessGroups) -> tuple[int, int]:
    """Return the part of a replicated tensor that data-parallel rank ``index`` writes: an equal one."""
    is_expert = not getattr(tensor, "allreduce", True)
    count = (groups.edp if is_expert else groups.dp_cp).size()
    return tensor.numel() * index // count, tensor.numel() * (index + 1) // count


def blocks_to_load(chunks: Iterable[Any], ranges: Iterable[OwnedRange], groups: ProcessGroups) -> Iterator[Block]:
    """Yield the blocks that this rank needs: every weight that it holds, and ``ranges`` of the optimizer."""
    owned = {id(each.parameter): each for each in ranges}
    for tensor, pieces in local_pieces(chunks, groups):
        yield from _blocks(pieces, tensor.detach().view(-1), 0, tensor.numel(), "")
        mine = owned.get(id(tensor))
        if mine is not None:
            for name, state in mine.tensors.items():
                yield from _blocks(pieces, state, mine.start, mine.stop, f"{OPTIMIZER_PREFIX}{name}.")


def _blocks(pieces: list[Piece], flat: torch.Tensor, start: int, stop: int, prefix: str) -> Iterator[Block]:
    """Cut ``flat``, elements ``[start, stop)`` of the local tensor that ``pieces`` describe, into blocks."""
    limit = BUCKET_BYTES // flat.element_size()
    for piece in pieces:
        begin, end = max(start, piece.start), min(stop, piece.start + piece.numel)
        for box in boxes(piece.shape, begin - piece.start, end - piece.start, limit):
            place = piece.start + box.start - start
            local = (0,) * piece.lead + box.offsets
            yield Block(
                key=prefix + piece.key,
                global_shape=piece.global_shape,
                offsets=tuple(a + b for a, b in zip(piece.offsets, local, strict=True)),
                sizes=(1,) * piece.lead + box.sizes,
                data=flat[place : place + box.numel],
                flexible=piece.flexible,
            )
