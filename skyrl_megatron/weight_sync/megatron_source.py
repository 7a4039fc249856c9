"""A Megatron model as the source of HF tensors: plain, with adapters merged, or quantised to 8 bits.

The base in the trainer stays as it is: products of factors are added to the rows that are copied into a bucket, in
fp32 and rounded once, as ``bridges/merge_adapter.py`` does. So a sync holds no second copy of the weights, and an
adapter that has gone back to zero sends the base bit for bit. A rank's shares of the two factors are what its share of
the map needs, so that nothing is gathered.

Each matrix that the folder has in 8 bits travels as two tensors, under the names on disk: its values, float8 E4M3, and
a scale for each block, both made of the trainer's weights as vLLM's quantiser makes them (``bridges/quantiser.py``).
Values are made when they are copied into a bucket, so that nothing is held but scales. The edges of shards go through
blocks, so the ranks of a matrix compare the largest |w| of each block first, and have all of its scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.errors import BridgeError
from bridges.quantisation import EngineForm
from bridges.quantized import DequantizedFolder, add_largest, as_sent, no_largest, quantised_rows, scales_of
from bridges.rules import BoundRow, Entry, unshard
from bridges.source import open_hf
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.lora.attach import Adapters, adapter_modules
from skyrl_megatron.runtime.lora.layers import Adapter
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.slices import Unroutable
from skyrl_megatron.weight_sync.tensors import (
    FUSED_EXPERTS,
    VALUES,
    RowRange,
    TensorShard,
    as_rows,
    dtype_name,
    place_of,
    travelling,
    turning,
)

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


@dataclass(slots=True)
class _Factors:
    """Those of an adapter, as of the last refresh (``Adapter.whole_factors``)."""

    adapter: Adapter
    a: Tensor | None = None
    b: Tensor | None = None

    def added_to(self, base: Tensor, rows: slice, columns: slice, number: int | None) -> Tensor:
        """Add rows and columns of the product to those of the base. ``number``: of the expert, among this rank's."""
        assert self.a is not None and self.b is not None, "refresh() comes first"
        a, b = (each if number is None or each.dim() == 2 else each[number] for each in (self.a, self.b))
        return (base.float() + b[rows] @ a[:, columns] * self.adapter.scale).to(base.dtype)


class MergedWeightSource(MegatronWeightSource):
    """What :class:`MegatronWeightSource` lists, with ``adapters`` in it."""

    def __init__(self, adapters: Adapters, groups: ProcessGroups) -> None:
        super().__init__(adapters.model, groups)
        self._factors: list[_Factors] = []
        self._of_weight: dict[str, tuple[_Factors, int | None]] = {}
        for adapter in (each for hung in adapters.hung for each in adapter_modules(hung)):
            self._factors.append(_Factors(adapter))
            if adapter.experts is None:
                self._of_weight[f"{adapter.name}.weight"] = self._factors[-1], None
                continue
            for number, expert in enumerate(adapter.experts):
                name = adapter.name.replace(".experts.", f".experts.{expert}.")
                self._of_weight[f"{name}.weight"] = self._factors[-1], number

    def refresh(self) -> None:
        """Take the factors as they are now."""
        for factors in self._factors:
            factors.a, factors.b = factors.adapter.whole_factors()

    def _all(self) -> Iterator[tuple[LocalWeight, Any, Any, TensorShard]]:
        for weight, over, replicas, shard in super()._all():
            if found := self._of_weight.get(weight.entry.name):
                shard = replace(shard, make=partial(_merged, shard, *found))
            yield weight, over, replicas, shard


@torch.no_grad()
def _merged(base: TensorShard, factors: _Factors, number: int | None, rows: slice, columns: slice) -> Tensor:
    part = base.part(rows, columns)
    return factors.added_to(part if isinstance(part, Tensor) else part(), rows, columns, number)


AT_ONCE = 2**22
"""Blocks whose largest |w| ranks compare in one message."""


@dataclass(slots=True)
class Matrix:
    """A matrix of the folder of which this rank holds a shard."""

    form: EngineForm
    shape: tuple[int, int]
    """Of the whole."""
    local: Tensor
    """[rows, columns] of the shard, which may hold rows of other matrices too."""
    own: Sequence[RowRange]
    """Where rows of the shard are in the matrix."""
    group: Any
    """Of the ranks that hold the others; None: this rank has all of it."""
    numbers: Tensor
    """[rows] int64: the row of the matrix that each row of the shard is (:func:`numbers_of`)."""
    scales: Tensor | None = None
    """[grid] of the whole (``quantiser.scales_of``), as of the last refresh."""

    @property
    def column(self) -> int:
        """The first column of the matrix that the shard holds."""
        return self.own[0].column if self.own else 0

    def add_largest(self, largest: Tensor) -> None:
        """Let ``largest`` [grid] int32 know the shard."""
        for span in self.own:
            rows = _rows(span)
            add_largest(self.form, largest, self.local[rows], self.numbers[rows], self.column)

    def values(self, rows: slice, columns: slice) -> Tensor:
        """Quantise a part of the shard: [rows, columns], a byte each."""
        assert self.scales is not None, "refresh() comes first"
        column = self.column + (columns.start or 0)
        made = quantised_rows(self.form, self.local[rows, columns], self.scales, self.numbers[rows], column)
        return made.view(torch.uint8)

    def sent_scales(self, rows: slice, columns: slice) -> Tensor:
        """Return a part of the scales as engines take them."""
        assert self.scales is not None, "refresh() comes first"
        return as_sent(self.form, self.scales[rows, columns])


class QuantisedWeightSource(MegatronWeightSource):
    """What :class:`MegatronWeightSource` lists, experts one by one, with the matrices ``names`` in ``form``.

    ``names``: HF names of weights. Raises WeightSyncError for one that is no matrix made of rows on disk.
    """

    experts_fused = False

    def __init__(self, model: ModelChunks, groups: ProcessGroups, form: EngineForm, names: Collection[str]) -> None:
        super().__init__(model, groups)
        self.form, self.names = form, names
        self._shards: list[TensorShard] = []
        self._held: tuple[list[TensorShard], list[int]] = [], []
        self._matrices: list[Matrix] = []
        self._addresses: list[int] | None = None
        self._numbers: dict[tuple[Sequence[RowRange], int], Tensor] = {}  # experts have the same

    @classmethod
    def of_folder(cls, model: ModelChunks, groups: ProcessGroups) -> QuantisedWeightSource:
        """Return the source of what the folder that ``model`` was built of has in 8 bits. Raises WeightSyncError for a
        form that weights cannot be brought into."""
        path = model.hf.path
        assert path is not None, "a model of no folder"
        try:
            folder, form = open_hf(path), EngineForm.of(model.hf.config, f"{path}/config.json")
        except BridgeError as error:
            raise WeightSyncError(str(error)) from error
        assert isinstance(folder, DequantizedFolder) and form is not None, path
        return cls(model, groups, form, folder.in_8_bits)

    def shards(self) -> Sequence[TensorShard]:
        self._look()
        return self._shards

    def held(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        self._require_rows()
        self._look()
        return self._held

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of the weights as they are now. Collective over tp and etp."""
        self._look()
        for matrices in _batches(self._matrices):
            group = matrices[0].group
            each = [no_largest(self.form, matrix.shape, matrix.local.device) for matrix in matrices]
            for matrix, largest in zip(matrices, each, strict=True):
                matrix.add_largest(largest)
            if group is not None:
                together = torch.cat([largest.flatten() for largest in each])
                dist.all_reduce(together, dist.ReduceOp.MAX, group)
                parts = together.split([largest.numel() for largest in each])
                each = [part.view(largest.shape) for part, largest in zip(parts, each, strict=True)]
            for matrix, largest in zip(matrices, each, strict=True):
                matrix.scales = scales_of(self.form, largest)

    def _look(self) -> None:
        """List shards and matrices, anew where the weights have moved."""
        addresses = self.addresses()
        if self._addresses == addresses:
            return
        self._shards, self._held, self._matrices, self._addresses = [], ([], []), [], None
        for weight, over, replicas, shard in self._all():
            # two places for each tensor, so that the scales of one come before the values of the next
            shard = replace(shard, meta=replace(shard.meta, position=2 * shard.meta.position))
            rank = 0 if shard.group is None else int(over.rank())
            scales = None
            if shard.meta.name in self.names:
                if not weight.entry.has_rows_of_hf or len(shard.meta.shape) != 2:
                    raise WeightSyncError(
                        f"{shard.meta.name} {list(shard.meta.shape)} has 8 bits in the engines' folder and is no "
                        "matrix made of rows there, so that it cannot be quantised as it is sent: give engines a "
                        "folder without quantisation"
                    )
                assert shard.make is None, "a frozen base that is kept in 8 bits is not sent"
                shard, scales = self._quantised(shard, rank)
            is_sent = self._is_sent(weight, over, replicas)
            self._list(shard, rank, is_sent)
            if scales is not None:
                self._list(scales, 0, is_sent and rank == 0)
        self._addresses = addresses

    def _list(self, shard: TensorShard, owner: int, is_sent: bool) -> None:
        self._held[0].append(shard)
        self._held[1].append(owner)
        if is_sent:
            self._shards.append(shard)

    def _quantised(self, shard: TensorShard, rank: int) -> tuple[TensorShard, TensorShard]:
        """Return the values and the scales that a matrix becomes. ``rank``: this rank's among its owners."""
        rows, columns = shard.meta.shape
        own = [span for span in shard.ranges if span.owner == rank]
        numbers = self._numbers.setdefault((tuple(own), len(shard.local)), numbers_of(own, shard.local))
        matrix = Matrix(self.form, (rows, columns), shard.local, own, shard.group, numbers)
        self._matrices.append(matrix)
        like = torch.empty(shard.local.shape, dtype=torch.uint8, device="meta")
        values = replace(shard, meta=replace(shard.meta, dtype=VALUES), local=like, make=matrix.values)
        grid = self.form.grid(matrix.shape)
        name, position = shard.meta.name + self.form.suffix, shard.meta.position + 1
        meta = TensorMeta(name, self.form.scale_dtype, grid, position=position)
        like = torch.empty(grid, dtype=meta.torch_dtype, device="meta")
        return values, TensorShard(meta, like, [RowRange(0, 0, grid[0], 0)], make=matrix.sent_scales)


def numbers_of(own: Sequence[RowRange], local: Tensor) -> Tensor:
    """Return [rows of ``local``] int64: the row of the tensor that each is, going by ``own`` ranges of a shard; −1
    where it is a row of another."""
    numbers = torch.full((len(local),), -1)
    for span in own:
        numbers[_rows(span)] = torch.arange(span.start, span.start + span.count)
    return numbers.to(local.device)


def _rows(span: RowRange) -> slice:
    return slice(span.first, span.first + span.step * (span.count - 1) + 1, span.step)


def _batches(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Join neighbours that the same ranks hold, :data:`AT_ONCE` blocks at most; alike on all these ranks."""
    batch: list[Matrix] = []
    size = 0
    for matrix in matrices:
        blocks = torch.Size(matrix.form.grid(matrix.shape)).numel()
        if batch and (matrix.group is not batch[0].group or size + blocks > AT_ONCE):
            yield batch
            batch, size = [], 0
        batch.append(matrix)
        size += blocks
    if batch:
        yield batch
