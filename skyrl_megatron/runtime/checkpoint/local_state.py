"""What a rank holds of a model and its optimizer, as blocks of global tensors.

Keys, global shapes and offsets are those of Megatron's ``sharded_state_dict()``: ``decoder.layers.…`` for weights and
``optimizer.state.{param,exp_avg,exp_avg_sq}.<weight's key>`` for the optimizer, the names of its
``fully_reshardable`` format. A rank saves the flat ranges that its distributed optimizer owns, weights and moments
alike, cut into boxes; it loads whole weights and its own ranges of the moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.boxes import Index, boxes
from skyrl_megatron.runtime.checkpoint.optimizer_state import OwnedRange, owned_ranges, sharded_parameters
from skyrl_megatron.runtime.model.local_weights import ADAPTERS

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from skyrl_megatron.runtime.parallel_state import ProcessGroups

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
