"""The reshard plan: which slices each trainer rank sends to each engine worker, in buckets.

:func:`plan_reshard` is a pure function of the source maps and the target maps (``slices.py``). A worker receives each
element that it needs once, from one of the ranks that hold it. Replicas take turns, so that they share the work. All
buckets have one global order, and every rank and worker processes its own buckets in that order. That rules out
deadlocks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import ALIGNMENT, PAGE, TensorMeta
from skyrl_megatron.weight_sync.slices import (
    COLUMN,
    COLUMNS,
    ROW,
    ROWS,
    TENSOR,
    ReshardUnsupported,
    SourceMap,
    Table,
    TargetMap,
    TransferList,
    named_ranks,
    rows_of,
    width_of,
)

# the position of a slice as one number: tensor, first column, first row
_TENSOR_BITS, _COLUMN_BITS, _ROW_BITS = 21, 18, 24


class SourceSlices:
    """All slices of the source maps, each once, with the ranks that hold it."""

    def __init__(self, tensors: Sequence[TensorMeta], source_maps: Sequence[SourceMap]) -> None:
        numbers = {meta.name: number for number, meta in enumerate(tensors)}
        tables = []
        for rank, source_map in enumerate(source_maps):
            tensor_numbers = np.array([numbers[meta.name] for meta in source_map.tensors], np.int64)
            columns = source_map.slices
            tables.append(
                np.column_stack([tensor_numbers[columns[:, 0]], columns[:, 1:], np.full(len(columns), rank)])
            )
        held = np.concatenate(tables)
        # the position has 63 bits, so that it sorts as a positive int64
        if held[:, 0].max(initial=0) >> _TENSOR_BITS or held[:, 1].max(initial=0) >> _ROW_BITS:
            raise ReshardUnsupported(
                f"{len(tensors)} tensors, or one of more than {1 << _ROW_BITS} rows, are too many"
            )
        if held[:, 3].max(initial=0) >> _COLUMN_BITS:
            raise ReshardUnsupported(f"a tensor of more than {1 << _COLUMN_BITS} columns is too wide")
        position = _place(held[:, 0], held[:, 3], held[:, 1])
        # stable: holders of one slice stay in the order of ranks, and the plan is the same every time
        order = np.argsort(position, kind="stable")
        self.held = held[order]
        """[n, 9]: the columns of ``SourceMap.slices``, and the rank."""
        position = position[order]
        self.first: Table = _begins(position)
        """Index of the first holder of each slice in :attr:`held`."""
        self.copies: Table = np.diff(self.first, append=len(position))
        self.slices = self.held[self.first]
        # in a C-ordered table the elements of a column are nine apart, and each read fetches a cache line
        self.columns = self.slices.T.copy()
        """:attr:`slices` transposed, because columns are read one by one."""
        self.place = position[self.first]
        self._check(tensors)
        self.bands = _begins(self.place >> _ROW_BITS)
        """Index of the first slice of each band. A band is all slices of the same columns of a tensor."""
        self.size: Table = np.diff(self.bands, append=len(self.place))
        """Number of slices of each band."""
        self.of_tensor: Table = np.searchsorted(self.columns[0][self.bands], np.arange(len(tensors) + 1))
        """Index of the first band of each tensor, then the number of bands."""
        # A random number per rank: the sum over a slice's holders names their set, and two sets collide with a
        # chance of 2⁻⁶². Comparing the sets themselves would take a loop in Python over all slices.
        weights = np.random.default_rng(0).integers(1, 1 << 62, len(source_maps))
        _, self.kind = np.unique(np.add.reduceat(weights[self.held[:, 8]], self.first), return_inverse=True)
        """Kind of each slice: slices that the same ranks hold have the same kind."""

    def _check(self, tensors: Sequence[TensorMeta]) -> None:
        """Raise WeightSyncError unless every element of every tensor is in exactly one slice."""
        tensor, row, rows, column, columns = self.slices[:, :5].T
        unlike = (np.repeat(self.slices[:, [2, 4]], self.copies, axis=0) != self.held[:, [2, 4]]).any(1)
        if unlike.any():
            slice_index = int(np.searchsorted(self.first, unlike.argmax(), "right")) - 1
            raise self._overlap(tensors, slice_index, slice_index)
        follows = (tensor[1:] == tensor[:-1]) & (column[1:] == column[:-1])
        overlap = follows & ((row[1:] < row[:-1] + rows[:-1]) | (columns[1:] != columns[:-1]))
        overlap |= (tensor[1:] == tensor[:-1]) & ~follows & (column[1:] < column[:-1] + columns[:-1])
        if overlap.any():
            slice_index = int(overlap.argmax())
            raise self._overlap(tensors, slice_index, slice_index + 1)
        # bincount sums in float64: exact up to 2⁵³ elements
        area = np.bincount(tensor, rows * columns, len(tensors)).astype(np.int64)
        sizes = np.array([rows_of(meta) * width_of(meta.shape) for meta in tensors], np.int64)
        for number in np.flatnonzero(area != sizes).tolist():
            raise WeightSyncError(
                f"{area[number]} of {sizes[number]} elements of {tensors[number].name} are held, by "
                f"{named_ranks(self.held[self.held[:, 0] == number, 8])}{self._missing_rows(number, tensors[number])}"
            )

    def _overlap(self, tensors: Sequence[TensorMeta], one: int, other: int) -> WeightSyncError:
        """Return the error for two slices that overlap, or for one slice that ranks hold in different sizes."""
        number, row, rows = self.slices[other, :3].tolist()
        ranks = [
            self.held[self.first[slice_index] : self.first[slice_index] + self.copies[slice_index], 8]
            for slice_index in (one, other)
        ]
        return WeightSyncError(
            f"rows {row} to {row + rows} of {tensors[number].name} are held in parts that overlap, by "
            f"{named_ranks(np.concatenate(ranks))}"
        )

    def _missing_rows(self, number: int, meta: TensorMeta) -> str:
        """Name the first rows of a tensor that no rank holds, for a message; empty if only columns are missing."""
        own = self.slices[self.slices[:, 0] == number]
        for column in np.unique(own[:, 3]):
            end = 0
            for row, rows in [*own[own[:, 3] == column, 1:3].tolist(), (rows_of(meta), 0)]:
                if row > end:
                    return f"; rows {end} to {row} by none"
                end = row + rows
        return ""

    def under(self, copies: Table) -> tuple[Table, Table]:
        """Return the pairs (copy, slice), [pairs] each, that have elements in common. ``copies`` [9, n]:
        ``TargetMap.copies`` transposed."""
        tensor, row, rows = copies[TENSOR], copies[ROW], copies[ROWS]
        which, band = spread(self.of_tensor[tensor], self.of_tensor[tensor + 1])
        low = self.bands[band]
        high = low + self.size[band]
        # most bands have one slice, which needs no search
        several = np.flatnonzero(self.size[band] > 1)
        if len(several):
            which_of, first_slice = which[several], low[several]
            column = self.columns[3][first_slice]
            position = _place(tensor[which_of], column, row[which_of])
            first = np.searchsorted(self.place, position, "right") - 1
            # the search may end in the band before, if the copy starts before the first slice of this one
            low[several] = np.maximum(first, first_slice)
            high[several] = np.searchsorted(self.place, position + rows[which_of] - 1, "right")
        pair, slice_index = spread(low, high)
        return which[pair], slice_index


def _place(tensor: Table, column: Table, row: Table) -> Table:
    return (tensor << (_COLUMN_BITS + _ROW_BITS)) | (column << _ROW_BITS) | row


def _begins(values: Table) -> Table:
    """Return where each run of equal values begins."""
    new = np.ones(len(values), bool)
    new[1:] = values[1:] != values[:-1]
    return np.flatnonzero(new).astype(np.int64)


def spread(low: Table, high: Table) -> tuple[Table, Table]:
    """Return (index, value), [values] each, for every value of every range ``low`` … ``high`` [n]; high is not in
    it."""
    count = np.maximum(high - low, 0)
    if (count == 1).all():
        return np.arange(len(count)), low
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + low[which]


# 2 · rank + 1 has to fit into the uint16 that of_worker sorts by
MOST_RANKS = 1 << 15
DIRECT_FRACTION = 64
"""A contiguous copy of at least 1 / DIRECT_FRACTION of a bucket is sent as a separate bucket, without a buffer."""


type _Outgoing = tuple[Table, Table, Table]
"""For one worker: its buckets, the copies as their senders make them, and the first copy of each rank."""


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The send list of each rank and the receive list of each worker."""

    ranks: Sequence[TransferList]
    workers: Sequence[TransferList]


@dataclass(frozen=True, slots=True)
class Colocation:
    """Which rank is on the device of each worker, and how many ranks a node has."""

    ranks: Sequence[int]
    per_node: int

    def nearest(self, slices: SourceSlices, worker: int) -> tuple[Table, Table, Table]:
        """Find the holders of each kind of slice that are nearest to a worker: the rank on its device, else the ranks
        of its node, else all. Return their number per kind [kinds], where each kind begins in the last table [kinds],
        and their indices among the holders [holders]."""
        local_rank = self.ranks[worker]
        _, examples = np.unique(slices.kind, return_index=True)
        nearest = []
        for first, copies in zip(slices.first[examples].tolist(), slices.copies[examples].tolist(), strict=True):
            rank = slices.held[first : first + copies, 8]
            far = np.where(rank == local_rank, 0, np.where(rank // self.per_node == local_rank // self.per_node, 1, 2))
            nearest.append(np.flatnonzero(far == far.min()))
        count = np.array([len(holders) for holders in nearest], np.int64)
        return count, np.cumsum(count) - count, np.concatenate(nearest) if nearest else count


def plan_reshard(
    tensors: Sequence[TensorMeta],
    source_maps: Sequence[SourceMap],
    target_maps: Sequence[TargetMap],
    bucket_bytes: int,
    colocation: Colocation | None = None,
) -> ReshardPlan:
    """Plan which rank sends which slices to which worker.

    ``tensors``: in the order in which the target maps number them. ``colocation``: a worker gets a slice that several
    ranks hold from the nearest of them. Raises WeightSyncError if ranks do not hold all of a tensor, or hold slices
    that overlap: no other path would repair that. Raises ReshardUnsupported for more ranks or larger tensors than a
    plan can index.
    """
    if len(source_maps) > MOST_RANKS:
        raise ReshardUnsupported(f"a reshard plan has at most {MOST_RANKS} ranks, the trainer has {len(source_maps)}")
    slices = SourceSlices(tensors, source_maps)
    itemsize = np.array([meta.torch_dtype.itemsize for meta in tensors], np.int64)
    kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(meta.dtype for meta in tensors))}
    dtypes = np.array([kinds[meta.dtype] for meta in tensors], np.int64)
    names = {name: number for number, name in enumerate(dict.fromkeys(meta.adapter for meta in tensors))}
    adapters = np.array([names[meta.adapter] for meta in tensors], np.int64)
    alike: dict[bytes, list[tuple[TargetMap, list[int]]]] = {}  # workers with equal target maps need equal slices
    for worker, target_map in enumerate(target_maps):
        # The sum of the columns is a cheap key. _equal separates tables that share it by chance.
        candidates = alike.setdefault(target_map.copies.sum(0).tobytes(), [])
        same = next((workers for first, workers in candidates if _equal(first, target_map)), None)
        if same is None:
            candidates.append((target_map, [worker]))
        else:
            same.append(worker)

    def pieces_of(target_map: TargetMap) -> _NeededSlices:
        return _NeededSlices(slices, target_map, itemsize, dtypes, kinds, adapters, bucket_bytes)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy releases the GIL while it computes
        distinct = list(itertools.chain.from_iterable(alike.values()))
        pieces = pool.map(pieces_of, [target_map for target_map, _ in distinct])
        of = {worker: needed for needed, (_, workers) in zip(pieces, distinct, strict=True) for worker in workers}
        # popped: the tables of a target map are freed with the last worker that has it
        lists = list(pool.map(lambda worker: of.pop(worker).of_worker(worker, colocation), range(len(target_maps))))
        begins = range(len(source_maps) + 1)
        outgoing = [(received.buckets, copies, np.searchsorted(ranks, begins)) for received, copies, ranks in lists]
        of_ranks = pool.map(lambda rank: _of_rank(rank, outgoing), range(len(source_maps)))
        return ReshardPlan(list(of_ranks), [received for received, _, _ in lists])


def _equal(one: TargetMap, other: TargetMap) -> bool:
    same = one.targets is other.targets or one.targets == other.targets
    return same and np.array_equal(one.copies, other.copies)


class _NeededSlices:
    """The slices that the workers with one target map need, cut at the ends of source slices and of half buckets."""

    def __init__(
        self,
        slices: SourceSlices,
        target_map: TargetMap,
        itemsize: Table,
        dtypes: Table,
        kinds: dict[str, int],
        adapters: Table,
        bucket_bytes: int,
    ) -> None:
        self.slices, self.half, self.adapters = slices, bucket_bytes // 2, adapters
        table = target_map.copies.T.copy()
        which, slice_index = slices.under(table)
        copies, (_, first, held_rows, first_column, held_columns) = table[:, which], slices.columns[:5, slice_index]
        row = np.maximum(copies[ROW], first)
        rows = np.minimum(copies[ROW] + copies[ROWS], first + held_rows) - row
        column = np.maximum(copies[COLUMN], first_column)
        columns = np.minimum(copies[COLUMN] + copies[COLUMNS], first_column + held_columns) - column
        size = itemsize[copies[TENSOR]]
        pieces = [slice_index, row, rows, column, columns, columns * size, *copies]
        some = (rows > 0) & (columns > 0)
        pieces = self._cut(pieces if some.all() else [values[some] for values in pieces])
        self.slice_index, self.row, rows, self.column, columns, row_bytes, *of_route = pieces
        tensor, target, from_row, _, from_column, _, into, by_row, by_column = of_route
        size = itemsize[tensor]
        self.nbytes = rows * row_bytes
        self.padded = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        offset = into + (self.row - from_row) * by_row + (self.column - from_column) * by_column
        self.copies = np.column_stack(
            [tensor, np.zeros_like(tensor), rows, columns, target, offset, by_row, by_column]
        )
        """The columns of ``TransferList.copies``, without the positions in buckets."""
        self.first, self.holders, self.shares = (
            slices.first[self.slice_index],
            slices.copies[self.slice_index],
            self._shares(),
        )
        # A copy travels without a buffer only if its bytes are alike on both sides: whole rows, contiguous in
        # the target, of the target's dtype. The size is a multiple of a page and the offset of 8 bytes, because
        # checksum() reads them.
        self.direct = self.nbytes >= bucket_bytes // DIRECT_FRACTION
        large = np.flatnonzero(self.direct)
        whole_rows = (columns == slices.columns[4, self.slice_index]) & (
            (slices.columns[7, self.slice_index] == 1) | (rows == 1)
        )
        in_place = ((by_column == 1) | (columns == 1)) & ((by_row == columns) | (rows == 1))
        aligned = (self.nbytes % PAGE == 0) & (offset * size % 8 == 0)
        types = [kinds.get(target_map.targets[number][2], -1) for number in target[large].tolist()]
        self.direct[large] = (whole_rows & in_place & aligned)[large] & (dtypes[tensor[large]] == types)

    def _cut(self, pieces: list[Table]) -> list[Table]:
        """Cut pieces (slice, row, rows, column, columns, bytes of a row, …; [n] each) by rows, so that each fits into
        half a bucket."""
        row_bytes, rows = pieces[5], pieces[2]
        if len(row_bytes) and row_bytes.max() > self.half:
            raise ReshardUnsupported(f"a row of {row_bytes.max()} bytes does not fit into half a bucket")
        most = np.maximum(self.half // row_bytes, 1)
        if (rows <= most).all():
            return pieces
        which, nth = spread(np.zeros(len(rows), np.int64), -(-rows // most))
        cut, most = [values[which] for values in pieces], most[which]
        cut[1] += nth * most
        cut[2] = np.minimum(most, cut[2] - nth * most)
        return cut

    def of_worker(self, worker: int, colocation: Colocation | None) -> tuple[TransferList, Table, Table]:
        """Return the receive list of a worker, the copies as their senders make them, sorted by rank, and the rank of
        each copy."""
        if colocation is None:
            holder = self.first + (self.shares + worker) % self.holders
        else:
            (count, begins, places), kind = colocation.nearest(self.slices, worker), self.slices.kind[self.slice_index]
            holder = self.first + places[begins[kind] + (self.shares + worker) % count[kind]]
        rank = self.slices.held[holder, 8]
        order = np.argsort((2 * rank + self.direct).astype(np.uint16), kind="stable")  # sorted by radix
        copies, held = self.copies.take(order, axis=0), self.slices.held.take(holder[order], axis=0)
        rank, direct, tensor, padded = held[:, 8], self.direct[order], copies[:, 0], self.padded[order]
        before = np.cumsum(padded) - padded
        new = np.ones(len(rank), bool)
        adapter = self.adapters[tensor]  # a bucket is of one adapter: not all of them travel in every sync
        new[1:] = (rank[1:] != rank[:-1]) | (direct[1:] != direct[:-1]) | (adapter[1:] != adapter[:-1])
        # A bucket ends where the running size passes a multiple of half a bucket. Pieces have at most half a
        # bucket, so no bucket exceeds a whole one.
        filled = before - before[np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))]
        new[1:] |= direct[1:] | (filled[1:] // self.half != filled[:-1] // self.half)
        first = np.flatnonzero(new)
        stop = np.append(first[1:], len(new)).astype(np.int64)[: len(first)]
        copies[:, 1] = before - before[first][np.cumsum(new) - 1]
        size = (copies[:, 1] + padded)[stop - 1]
        size = np.where(direct[first], size, np.maximum(-(-size // PAGE) * PAGE, PAGE))
        buckets = np.column_stack([rank[first], size, direct[first], first, stop, tensor[stop - 1]])
        # the global order: last tensor, then peer, then position
        turn = np.lexsort((first, rank[first], tensor[stop - 1]))
        source = copies.copy()
        source[:, 4], source[:, 6] = held[:, 5], held[:, 7]
        source[:, 5] = held[:, 6] + (self.row[order] - held[:, 1]) * held[:, 7]
        source[:, 7] = self.column[order] - held[:, 3]
        return TransferList(buckets[turn], copies), source, rank

    def _shares(self) -> Table:
        """Return the share that each piece belongs to. Replicas take turns with shares of at most half a bucket."""
        kind, copies = self.slices.kind[self.slice_index], self.slices.copies[self.slice_index]
        order = np.argsort(kind, kind="stable")
        # in turns by bytes, not by pieces: pieces of one kind differ in size by orders of magnitude
        before = np.empty(len(order), np.int64)
        before[order] = np.cumsum(self.nbytes[order]) - self.nbytes[order]
        total = np.bincount(kind, self.nbytes).astype(np.int64)
        before -= (np.cumsum(total) - total)[kind]
        shares: Table = before // np.clip(-(-total[kind] // copies), 1, self.half)
        return shares


def _of_rank(rank: int, outgoing: Sequence[_Outgoing]) -> TransferList:
    """Assemble the send list of a rank from what it sends to each worker."""
    buckets, copies, size = [np.zeros((0, 6), np.int64)], [np.zeros((0, 8), np.int64)], 0
    for worker, (of_worker, source, begins) in enumerate(outgoing):
        low, high = begins[rank : rank + 2]
        to_worker = of_worker[of_worker[:, 0] == rank]
        to_worker[:, 0] = worker
        # the copies of this rank start at ``size`` of its own table, not at ``low`` of the worker's
        to_worker[:, 3:5] += size - low
        buckets.append(to_worker)
        copies.append(source[low:high])
        size += high - low
    table = np.concatenate(buckets)
    return TransferList(table[np.lexsort((table[:, 3], table[:, 0], table[:, 5]))], np.concatenate(copies))
