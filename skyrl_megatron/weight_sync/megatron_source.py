"""A Megatron model as the source of HF tensors: which rows of which rank's shard make up each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bridges.rules import BoundRow, Entry
from bridges.shard import unshard
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.metadata import FUSED_EXPERTS
from skyrl_megatron.weight_sync.routes import Unroutable
from skyrl_megatron.weight_sync.source import RowRange, TensorShard, as_rows, dtype_name, place_of
from skyrl_megatron.weight_sync.turned import travelling, turning

type RowRanges = tuple[RowRange, ...]


class MegatronWeightSource:
    """The weights of a rank of ``model``: HF names and shapes in module order. Experts travel one by one, or, where
    engines take them so (``metadata.FUSED_EXPERTS``), as rows of one tensor for all experts of the layer.

    Of the ranks that hold shards or copies of a tensor, the first of the first replica sends it: every pipeline
    stage its layers, every expert-parallel rank its experts. A value head is left out, engines have none. A draft head
    that is trained is the layer behind the last, for engines that draft with it; others do not take it.
    """

    experts_fused = True
    """Whether experts travel fused where engines take them so."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups) -> None:
        self.model, self.groups = model, groups

    def metadata(self) -> Sequence[TensorMeta]:
        return [shard.meta for shard in self.shards() if shard.rank == 0]

    def shards(self) -> Sequence[TensorShard]:
        return [shard for weight, over, replicas, shard in self._all() if self._is_sent(weight, over, replicas)]

    def held(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """List what this rank holds of any replica, see ``WeightSource``."""
        self._require_rows()
        found = [(shard, over.rank()) for weight, over, _, shard in self._all()]
        return [shard for shard, _ in found], [0 if shard.group is None else rank for shard, rank in found]

    def _require_rows(self) -> None:
        """Raise Unroutable for tensors that are on disk in another form than rows of Megatron's."""
        if turned := next((entry for entry in self.model.hf.plan.entries if not entry.has_rows_of_hf), None):
            raise Unroutable(f"{turned.hf[0].name} travels in another form than on disk")

    def _is_sent(self, weight: LocalWeight, over: Any, replicas: Any) -> bool:
        """Whether this rank sends the weight, or has a shard of it for the one that does."""
        return bool(replicas.rank() == 0 and (weight.entry.split.dim is not None or over.rank() == 0))

    def _all(self) -> Iterator[tuple[LocalWeight, Any, Any, TensorShard]]:
        """Yield (weight, group that it is split over, group of its replicas, shard) of all that this rank holds."""
        known: dict[tuple[BoundRow, int, int], tuple[RowRanges, ...]] = {}
        place = 0  # of a HF tensor, the same on all ranks of the groups it is put together in
        for weight in local_weights(self.model, self.groups):
            entry, groups = weight.entry, self.groups
            if weight.is_copy:
                continue
            over, replicas = (groups.etp, groups.edp) if entry.is_expert else (groups.tp, groups.dp_cp)
            size = 1 if entry.split.dim is None else over.size()
            local = as_rows(weight.name, weight.tensor)
            key = (entry.bound, size, len(local))
            if key not in known:
                known[key] = ranges_in_shards(entry, size, local)
            for number, (name, shape, rows, ranges) in enumerate(self._tensors(entry, known[key])):
                meta = TensorMeta(name, dtype_name(local), shape, rows, place + number, turning(entry))
                shard = TensorShard(meta, local, ranges, over if size > 1 else None, make=weight.make)
                yield weight, over, replicas, shard
            place += len(entry.hf)

    def _tensors(
        self, entry: Entry, pieces: tuple[RowRanges, ...]
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int] | None, RowRanges]]:
        """Yield (name, shape, rows, ranges) of what engines get of an entry; ``pieces``: ranges of its HF tensors."""
        fused = self.experts_fused and self.model.hf.config["model_type"] in FUSED_EXPERTS
        # vLLM's loaders of layers of multi-token prediction take experts one by one (models/glm4_moe_mtp.py)
        draft = self.model.hf.plan.draft_layer
        of_draft = draft is not None and entry.hf[0].name.startswith(f"model.layers.{draft}.")
        if entry.expert is None or not fused or of_draft:
            for (name, shape), ranges in zip(travelling(entry), pieces, strict=True):
                yield name, shape, None, ranges
            return
        layer, _, _ = entry.hf[0].name.rpartition(f".{entry.expert}.")
        height, width = entry.hf[0].shape
        joined = [
            replace(span, start=number * height + span.start)
            for number, ranges in enumerate(pieces)
            for span in ranges
        ]
        shape = (self.model.config.num_moe_experts, len(pieces) * height, width)
        name = "gate_up_proj" if len(pieces) == 2 else "down_proj"
        yield f"{layer}.{name}", shape, (entry.expert, entry.expert + 1), tuple(joined)

    def travels(self, adapter: str) -> bool:
        return True

    def refresh(self) -> None:
        """Do nothing: shards are views of the weights themselves."""

    def addresses(self) -> list[int]:
        tensors = (t for chunk in self.model.chunks for t in [*chunk.parameters(), *chunk.buffers()])
        return [number for tensor in tensors for number in place_of(tensor)]


def ranges_in_shards(entry: Entry, size: int, local: Tensor) -> tuple[RowRanges, ...]:
    """Find, for each tensor as which an entry travels, where its rows lie in the shards ([rows, columns] each) of
    ``size`` ranks, by sending row numbers through the conversion itself. ``local``: this rank's shard.
    """
    split_rows = size > 1 and entry.split.dim == 0
    held = len(local)
    numbers = torch.arange(held * (size if split_rows else 1)).unsqueeze(1)
    whole = unshard(list(torch.split(numbers, held)), entry)
    ranges: list[RowRanges] = []
    for piece in entry.to_hf(whole) if entry.has_rows_of_hf else (whole,):
        found = row_ranges(piece[:, 0].tolist(), held)
        if not split_rows and size > 1:
            width = local.shape[1]
            found = [
                RowRange(owner, span.start, span.count, span.first, span.step, owner * width)
                for owner in range(size)
                for span in found
            ]
        ranges.append(tuple(found))
    return tuple(ranges)


def row_ranges(numbers: Sequence[int], held: int) -> list[RowRange]:
    """Join evenly rising row numbers into ranges; each owner holds ``held`` rows.

    >>> row_ranges([0, 2, 4, 1, 3, 5], held=3)[0]
    RowRange(owner=0, start=0, count=2, first=0, step=2, column=0)
    """
    ranges: list[RowRange] = []
    start = 0
    while start < len(numbers):
        owner, first = divmod(numbers[start], held)
        stop, step = start + 1, 1
        while stop < len(numbers) and numbers[stop] // held == owner:
            ahead = numbers[stop] - numbers[stop - 1]
            if stop == start + 1 and ahead > 0:
                step = ahead
            elif ahead != step:
                break
            stop += 1
        ranges.append(RowRange(owner, start, stop - start, first, step))
        start = stop
    return ranges
