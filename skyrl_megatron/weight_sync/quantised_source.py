"""A Megatron model as the source of matrices in 8 bits: what an engine of a quantised folder takes.

Each matrix that the folder has in 8 bits travels as two tensors, under the names on disk: its values, float8 E4M3, and
a scale for each block, both made of the trainer's weights as vLLM's quantiser makes them (``bridges/quantiser.py``).
Values are made when they are copied into a bucket, so that nothing is held but scales. The edges of shards go through
blocks, so the ranks of a matrix compare the largest |w| of each block first, and have all of its scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bridges.engine_form import EngineForm
from bridges.errors import BridgeError
from bridges.quantiser import add_largest, as_sent, no_largest, quantised_rows, scales_of
from bridges.quantized import DequantizedFolder
from bridges.source import open_hf
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.model.build import ModelChunks
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
from skyrl_megatron.weight_sync.metadata import VALUES
from skyrl_megatron.weight_sync.source import RowRange, TensorShard

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
