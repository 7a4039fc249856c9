"""A Megatron model as a source of HF tensors: as it is, or quantised to 8 bits.

:class:`QuantisedWeightSource` sends each matrix that the folder has in 8 bits as two tensors, under the names on disk:
the values (float8 E4M3) and a scale per block, computed as vLLM's quantiser computes them (``bridges/quantized.py``).
Values are computed when they are copied into a bucket; only scales are kept. Shards may end within a block, so the
ranks of a matrix first reduce the largest |w| of each block, and then have all scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.errors import BridgeError
from bridges.quantisation import EngineForm
from bridges.quantized import (
    DequantizedFolder,
    block_scales,
    engine_scales,
    new_block_max,
    quantised_rows,
    update_block_max,
)
from bridges.rules import BoundRow, Entry, unshard
from bridges.source import open_hf
from skyrl_megatron.config.hf_model import ENGINE_KWARGS
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.plugins import ADAPTERS
from skyrl_megatron.runtime.adapters import TrainedAdapters
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.model.local_weights import LocalWeight, local_weights
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.slices import ReshardUnsupported
from skyrl_megatron.weight_sync.tensors import (
    FUSED_EXPERTS,
    VALUES,
    RowRange,
    TensorShard,
    WeightSource,
    as_rows,
    conversion_name,
    dtype_name,
    memory_id,
    sent_tensors,
)

type RowRanges = tuple[RowRange, ...]


class MegatronWeightSource:
    """The weights of a rank of ``model``: HF names and shapes in module order. Experts are sent one by one, or, for
    the families in ``tensors.FUSED_EXPERTS``, as rows of one tensor for all experts of a layer.

    Of the ranks that hold shards or copies of a tensor, the first rank of the first replica sends it: every pipeline
    stage sends its layers, every expert-parallel rank its experts. Value heads are left out, because engines have
    none. A trained draft head is sent as the layer after the last one; engines that do not draft ignore it.
    """

    experts_fused = True
    """Whether experts are sent fused for the families in ``FUSED_EXPERTS``."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups) -> None:
        self.model, self.groups = model, groups

    def metadata(self) -> Sequence[TensorMeta]:
        return [shard.meta for shard in self.shards() if shard.rank == 0]

    def shards(self) -> Sequence[TensorShard]:
        return [shard for weight, over, replicas, shard in self._all() if self._is_sent(weight, over, replicas)]

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """List all shards that this rank holds, see ``WeightSource``."""
        self._require_rows()
        found = [(shard, over.rank()) for weight, over, _, shard in self._all()]
        return [shard for shard, _ in found], [0 if shard.group is None else rank for shard, rank in found]

    def _require_rows(self) -> None:
        """Raise ReshardUnsupported for tensors whose rows on disk are not rows of Megatron's tensors."""
        if reordered := next((entry for entry in self.model.hf.plan.entries if not entry.has_rows_of_hf), None):
            raise ReshardUnsupported(f"{reordered.hf[0].name} is sent in another form than on disk")

    def _is_sent(self, weight: LocalWeight, over: Any, replicas: Any) -> bool:
        """Return whether this rank sends the weight, or holds a shard for the rank that sends it."""
        return bool(replicas.rank() == 0 and (weight.entry.split.dim is not None or over.rank() == 0))

    def _all(self) -> Iterator[tuple[LocalWeight, Any, Any, TensorShard]]:
        """Yield (weight, group that it is split over, group of its replicas, shard) of every weight of this rank."""
        ranges_of: dict[tuple[BoundRow, int, int], tuple[RowRanges, ...]] = {}
        position = 0  # of an HF tensor; the same on all ranks of the groups that gather it
        for weight in local_weights(self.model, self.groups):
            entry, groups = weight.entry, self.groups
            # a tied embedding exists on the first and on the last pipeline stage; the first sends it
            if weight.is_copy:
                continue
            over, replicas = (groups.etp, groups.edp) if entry.is_expert else (groups.tp, groups.dp_cp)
            size = 1 if entry.split.dim is None else over.size()
            local = as_rows(weight.name, weight.tensor)
            key = (entry.bound, size, len(local))
            # Equal for all layers and experts of one row of the family's table, of which a model
            # has thousands.
            if key not in ranges_of:
                ranges_of[key] = ranges_in_shards(entry, size, local)
            for number, (name, shape, rows, ranges) in enumerate(self._tensors(entry, ranges_of[key])):
                meta = TensorMeta(name, dtype_name(local), shape, rows, position + number, conversion_name(entry))
                shard = TensorShard(meta, local, ranges, over if size > 1 else None, make=weight.make)
                yield weight, over, replicas, shard
            position += len(entry.hf)

    def _tensors(
        self, entry: Entry, pieces: tuple[RowRanges, ...]
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int] | None, RowRanges]]:
        """Yield (name, shape, rows, ranges) of the tensors sent for an entry; ``pieces``: ranges of its HF tensors."""
        fused = self.experts_fused and self.model.hf.config["model_type"] in FUSED_EXPERTS
        # vLLM loads the experts of multi-token prediction layers one by one (models/glm4_moe_mtp.py)
        draft = self.model.hf.plan.draft_layer
        of_draft = draft is not None and entry.hf[0].name.startswith(f"model.layers.{draft}.")
        if entry.expert is None or not fused or of_draft:
            for (name, shape), ranges in zip(sent_tensors(entry), pieces, strict=True):
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

    def sends_adapter(self, adapter: str) -> bool:
        return True

    def refresh(self) -> None:
        """Do nothing: shards are views of the weights."""

    def addresses(self) -> list[int]:
        tensors = (t for chunk in self.model.chunks for t in [*chunk.parameters(), *chunk.buffers()])
        return [number for tensor in tensors for number in memory_id(tensor)]


def ranges_in_shards(entry: Entry, size: int, local: Tensor) -> tuple[RowRanges, ...]:
    """Find where the rows of each sent tensor of an entry are in the shards ([rows, columns]) of ``size`` ranks.

    It converts row numbers instead of weights. ``local``: this rank's shard.
    """
    split_rows = size > 1 and entry.split.dim == 0
    held = len(local)
    # Row numbers take the place of rows: what the conversion makes of them says where each row comes from.
    numbers = torch.arange(held * (size if split_rows else 1)).unsqueeze(1)
    row_numbers = unshard(list(torch.split(numbers, held)), entry)
    ranges: list[RowRanges] = []
    for piece in entry.to_hf(row_numbers) if entry.has_rows_of_hf else (row_numbers,):
        spans = row_ranges(piece[:, 0].tolist(), held)
        # split by columns: every owner has all rows, and its own columns of them
        if not split_rows and size > 1:
            width = local.shape[1]
            spans = [
                RowRange(owner, span.start, span.count, span.first, span.step, owner * width)
                for owner in range(size)
                for span in spans
            ]
        ranges.append(tuple(spans))
    return tuple(ranges)


def row_ranges(numbers: Sequence[int], held: int) -> list[RowRange]:
    """Join evenly spaced row numbers into ranges; each owner holds ``held`` rows.

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


AT_ONCE = 2**22
"""Maximum number of blocks whose largest |w| is reduced in one all-reduce."""


@dataclass(slots=True)
class QuantisedMatrix:
    """A matrix of the folder of which this rank holds a shard."""

    form: EngineForm
    shape: tuple[int, int]
    """Shape of the whole matrix."""
    local: Tensor
    """[rows, columns] of the shard, which may also hold rows of other matrices."""
    own: Sequence[RowRange]
    """Where the rows of the shard are in the matrix."""
    group: Any
    """Process group of the shards; None: this rank holds the whole matrix."""
    numbers: Tensor
    """[rows] int64: the matrix row of each row of the shard (:func:`matrix_rows`)."""
    scales: Tensor | None = None
    """[grid] of the whole matrix (``quantized.block_scales``), as of the last refresh."""

    @property
    def column(self) -> int:
        """The first column of the matrix that the shard holds."""
        return self.own[0].column if self.own else 0

    def update_block_max(self, largest: Tensor) -> None:
        """Update ``largest`` [grid] int32 with the shard's largest |w| of each block."""
        for span in self.own:
            rows = _rows(span)
            update_block_max(self.form, largest, self.local[rows], self.numbers[rows], self.column)

    def values(self, rows: slice, columns: slice) -> Tensor:
        """Quantise a part of the shard: [rows, columns] uint8."""
        assert self.scales is not None, "refresh() comes first"
        column = self.column + (columns.start or 0)
        made = quantised_rows(self.form, self.local[rows, columns], self.scales, self.numbers[rows], column)
        return made.view(torch.uint8)

    def sent_scales(self, rows: slice, columns: slice) -> Tensor:
        """Return a part of the scales, [rows, columns] of the grid, in the form and dtype that engines load."""
        assert self.scales is not None, "refresh() comes first"
        return engine_scales(self.form, self.scales[rows, columns])


class QuantisedWeightSource(MegatronWeightSource):
    """The tensors of :class:`MegatronWeightSource`, experts one by one, with the matrices ``names`` quantised to
    ``form``.

    ``names``: HF names of weights. Raises WeightSyncError for a weight that is not a matrix of rows on disk.
    """

    experts_fused = False

    def __init__(self, model: ModelChunks, groups: ProcessGroups, form: EngineForm, names: Collection[str]) -> None:
        super().__init__(model, groups)
        self.form, self.names = form, names
        self._shards: list[TensorShard] = []
        self._held: tuple[list[TensorShard], list[int]] = [], []
        self._matrices: list[QuantisedMatrix] = []
        self._addresses: list[int] | None = None
        self._numbers: dict[tuple[Sequence[RowRange], int], Tensor] = {}  # experts have the same

    @classmethod
    def of_folder(cls, model: ModelChunks, groups: ProcessGroups) -> QuantisedWeightSource:
        """Return a source that quantises what the folder of ``model`` has in 8 bits. Raises WeightSyncError for a
        format that is not supported."""
        path = model.hf.path
        assert path is not None, "a model of no folder"
        try:
            folder, form = open_hf(path), EngineForm.of(model.hf.config, f"{path}/config.json")
        except BridgeError as error:
            raise WeightSyncError(str(error)) from error
        assert isinstance(folder, DequantizedFolder) and form is not None, path
        return cls(model, groups, form, folder.in_8_bits)

    def shards(self) -> Sequence[TensorShard]:
        self._update_list()
        return self._shards

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        self._require_rows()
        self._update_list()
        return self._held

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of the weights as they are now. Collective over tp and etp."""
        self._update_list()
        for matrices in _batches(self._matrices):
            group = matrices[0].group
            maxima = [new_block_max(self.form, matrix.shape, matrix.local.device) for matrix in matrices]
            for matrix, largest in zip(matrices, maxima, strict=True):
                matrix.update_block_max(largest)
            if group is not None:
                # One all-reduce for many matrices: a layer has two or three small grids per expert. Maxima are the
                # bits of |w| in fp32, which order like the numbers, with NaN above infinity: a NaN is not lost.
                together = torch.cat([largest.flatten() for largest in maxima])
                dist.all_reduce(together, dist.ReduceOp.MAX, group)
                parts = together.split([largest.numel() for largest in maxima])
                maxima = [part.view(largest.shape) for part, largest in zip(parts, maxima, strict=True)]
            for matrix, largest in zip(matrices, maxima, strict=True):
                matrix.scales = block_scales(self.form, largest)

    def _update_list(self) -> None:
        """List shards and matrices, again if the weights have moved."""
        addresses = self.addresses()
        # offloading and rebuilding move weights; shards and matrices are views of the old memory
        if self._addresses == addresses:
            return
        # None until the list is complete, so that a list that failed half-way is not used
        self._shards, self._held, self._matrices, self._addresses = [], ([], []), [], None
        for weight, over, replicas, shard in self._all():
            # two positions per tensor, so that the scales of one come before the values of the next
            shard = replace(shard, meta=replace(shard.meta, position=2 * shard.meta.position))
            rank = 0 if shard.group is None else int(over.rank())
            scales = None
            if shard.meta.name in self.names:
                if not weight.entry.has_rows_of_hf or len(shard.meta.shape) != 2:
                    raise WeightSyncError(
                        f"{shard.meta.name} {list(shard.meta.shape)} has 8 bits in the engines' folder but is not a "
                        "matrix of rows there, so it cannot be quantised while it is sent: give engines a folder "
                        "without quantisation"
                    )
                assert shard.make is None, "a frozen base that is kept in 8 bits is not sent"
                shard, scales = self._quantised(shard, rank)
            is_sent = self._is_sent(weight, over, replicas)
            self._list(shard, rank, is_sent)
            # after the reduction every owner of shards has all scales: rank 0 alone sends them
            if scales is not None:
                self._list(scales, 0, is_sent and rank == 0)
        self._addresses = addresses

    def _list(self, shard: TensorShard, owner: int, is_sent: bool) -> None:
        self._held[0].append(shard)
        self._held[1].append(owner)
        if is_sent:
            self._shards.append(shard)

    def _quantised(self, shard: TensorShard, rank: int) -> tuple[TensorShard, TensorShard]:
        """Return the shards of the values and of the scales of a matrix. ``rank``: this rank among its owners."""
        rows, columns = shard.meta.shape
        spans = [span for span in shard.ranges if span.owner == rank]
        numbers = self._numbers.setdefault((tuple(spans), len(shard.local)), matrix_rows(spans, shard.local))
        matrix = QuantisedMatrix(self.form, (rows, columns), shard.local, spans, shard.group, numbers)
        self._matrices.append(matrix)
        # without memory: values are computed when they are copied, and only shape and dtype are read here
        like = torch.empty(shard.local.shape, dtype=torch.uint8, device="meta")
        values = replace(shard, meta=replace(shard.meta, dtype=VALUES), local=like, make=matrix.values)
        grid = self.form.grid(matrix.shape)
        name, position = shard.meta.name + self.form.suffix, shard.meta.position + 1
        meta = TensorMeta(name, self.form.scale_dtype, grid, position=position)
        like = torch.empty(grid, dtype=meta.torch_dtype, device="meta")
        return values, TensorShard(meta, like, [RowRange(0, 0, grid[0], 0)], make=matrix.sent_scales)


def matrix_rows(own: Sequence[RowRange], local: Tensor) -> Tensor:
    """Return [rows of ``local``] int64: the matrix row of each row of a shard with the ranges ``own``; −1 for rows of
    another matrix."""
    numbers = torch.full((len(local),), -1)
    for span in own:
        numbers[_rows(span)] = torch.arange(span.start, span.start + span.count)
    return numbers.to(local.device)


def _rows(span: RowRange) -> slice:
    return slice(span.first, span.first + span.step * (span.count - 1) + 1, span.step)


def _batches(matrices: Sequence[QuantisedMatrix]) -> Iterator[list[QuantisedMatrix]]:
    """Batch consecutive matrices of one group, at most :data:`AT_ONCE` blocks; equal on all ranks of the group."""
    batch: list[QuantisedMatrix] = []
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


def weight_source(
    model: ModelChunks,
    adapters: Mapping[str, TrainedAdapters],
    groups: ProcessGroups,
    *,
    adapters_alone: bool,
    quantised: bool = False,
) -> WeightSource:
    """Return the source of what a rank sends to engines: the weights, with the adapter merged if one is trained, or
    only ``adapters`` (by name). ``quantised``: engines hold the weights in the 8-bit format of the model's folder.

    Raises WeightSyncError for an adapter that would be merged into 8-bit weights.
    """
    if not adapters:
        return QuantisedWeightSource.of_folder(model, groups) if quantised else MegatronWeightSource(model, groups)
    source: WeightSource
    if adapters_alone:
        source = ADAPTERS.require("source")(adapters, groups)
        return source
    if quantised:
        raise WeightSyncError(
            "trainer.policy.model.lora.sync_mode=merged: an adapter cannot be merged into 8-bit weights; set "
            f"{ENGINE_KWARGS}.load_format=dummy and {ENGINE_KWARGS}.hf_overrides.quantization_config=null"
        )
    (adapter,) = adapters.values()
    source = ADAPTERS.require("merged_source")(adapter, groups)
    return source
