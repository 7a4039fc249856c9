"""The plan of a sync by routes: for each pair of trainer rank and engine worker the copies between them, in buckets.

Joined from what ranks hold and what workers need (``routes.py``), a pure function. Each element that a worker needs
comes to it once, from one of the ranks that hold it; replicas take turns, so that they share the work. All buckets are
in one order, and every rank and worker goes through its own in that order, so that none waits for another in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_megatron.weight_sync.bucket import ALIGNMENT, PAGE, TensorMeta
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.routes import (
    COLUMN,
    COLUMN_STRIDE,
    COLUMNS,
    OFFSET,
    ROW,
    ROW_STRIDE,
    ROWS,
    TARGET,
    TENSOR,
    Holdings,
    Route,
    Table,
    Unroutable,
)
from skyrl_megatron.weight_sync.tiles import Tiles, spread

MOST_RANKS = 1 << 15
DIRECT_FRACTION = 64
"""A contiguous copy of at least this part of a bucket travels alone, from memory to memory without a buffer."""


type _Outgoing = tuple[Table, Table, Table]
"""Of a worker: its buckets, the copies of their senders, and where those of each rank begin."""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """What each rank sends and each worker receives."""

    ranks: Sequence[Parcels]
    workers: Sequence[Parcels]


def join(
    tensors: Sequence[TensorMeta], holdings: Sequence[Holdings], routes: Sequence[Route], bucket_bytes: int
) -> RoutePlan:
    """Join what ranks hold with what workers need of ``tensors``, which routes number them by.

    Raises Unroutable where ranks do not hold all of a tensor, or hold parts that overlap.
    """
    if len(holdings) > MOST_RANKS:
        raise Unroutable(f"{len(holdings)} ranks are more than {MOST_RANKS}")
    tiles = Tiles(tensors, holdings)
    itemsize = np.array([meta.torch_dtype.itemsize for meta in tensors], np.int64)
    kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(meta.dtype for meta in tensors))}
    dtypes = np.array([kinds[meta.dtype] for meta in tensors], np.int64)
    needed: dict[bytes, tuple[Route, _Pieces]] = {}  # workers with equal routes need equal pieces
    workers: list[Parcels] = []
    outgoing: list[_Outgoing] = []
    for worker, route in enumerate(routes):
        key = route.copies.tobytes()
        if key not in needed or needed[key][0].targets != route.targets:
            needed[key] = route, _Pieces(tiles, route, itemsize, dtypes, kinds, bucket_bytes)
        parcels, copies, ranks = needed[key][1].of_worker(worker)
        workers.append(parcels)
        outgoing.append((parcels.buckets, copies, np.searchsorted(ranks, range(len(holdings) + 1))))
    return RoutePlan([_of_rank(rank, outgoing) for rank in range(len(holdings))], workers)


class _Pieces:
    """What workers of one route need, cut where tiles end and where a bucket is full."""

    def __init__(
        self, tiles: Tiles, route: Route, itemsize: Table, dtypes: Table, kinds: dict[str, int], bucket_bytes: int
    ) -> None:
        self.tiles, self.half = tiles, bucket_bytes // 2
        which, tile = tiles.under(route.copies)
        copies, held = route.copies[which], tiles.tiles[tile]
        row = np.maximum(copies[:, ROW], held[:, 1])
        rows = np.minimum(copies[:, ROW] + copies[:, ROWS], held[:, 1] + held[:, 2]) - row
        column = np.maximum(copies[:, COLUMN], held[:, 3])
        columns = np.minimum(copies[:, COLUMN] + copies[:, COLUMNS], held[:, 3] + held[:, 4]) - column
        some = (rows > 0) & (columns > 0)
        table = np.column_stack([copies[:, TENSOR], tile, row, rows, column, columns, which])[some]
        table = self._cut(table, itemsize[table[:, 0]])
        tensor, self.tile, self.row, rows, self.column, columns, which = table.T.copy()
        self.nbytes = rows * columns * itemsize[tensor]
        self.padded = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        copies, held = route.copies[which], tiles.tiles[self.tile]
        by_row, by_column = copies[:, ROW_STRIDE], copies[:, COLUMN_STRIDE]
        offset = (
            copies[:, OFFSET] + (self.row - copies[:, ROW]) * by_row + (self.column - copies[:, COLUMN]) * by_column
        )
        target = copies[:, TARGET]
        self.copies = np.column_stack(
            [tensor, np.zeros_like(tensor), rows, columns, target, offset, by_row, by_column]
        )
        """The columns of ``Parcels.copies``, without places in buckets."""
        whole_rows = (columns == held[:, 4]) & ((held[:, 7] == 1) | (rows == 1))
        in_place = ((by_column == 1) | (columns == 1)) & ((by_row == columns) | (rows == 1))
        types = np.fromiter((kinds.get(target[2], -1) for target in route.targets), np.int64, len(route.targets))
        same_type = dtypes[tensor] == types[target]
        aligned = (self.nbytes % PAGE == 0) & (offset * itemsize[tensor] % 8 == 0)
        large = self.nbytes >= bucket_bytes // DIRECT_FRACTION
        self.direct = whole_rows & in_place & same_type & aligned & large

    def _cut(self, table: Table, itemsize: Table) -> Table:
        """Cut pieces by rows into those of half a bucket."""
        row_bytes = table[:, 5] * itemsize
        if len(row_bytes) and row_bytes.max() > self.half:
            raise Unroutable(f"a row of {row_bytes.max()} bytes does not fit into half a bucket")
        most = np.maximum(self.half // row_bytes, 1)
        which, nth = spread(np.zeros(len(table), np.int64), -(-table[:, 3] // most))
        cut, most = table[which], most[which]
        cut[:, 2] += nth * most
        cut[:, 3] = np.minimum(most, cut[:, 3] - nth * most)
        return cut

    def of_worker(self, worker: int) -> tuple[Parcels, Table, Table]:
        """Return what a worker receives, the copies of its buckets as their senders make them, rank after rank, and
        the rank of each."""
        holder = self.tiles.first[self.tile] + self._turns(worker)
        rank = self.tiles.held[holder, 8]
        order = np.argsort((2 * rank + self.direct).astype(np.uint16), kind="stable")  # sorted by radix
        copies, held = self.copies.take(order, axis=0), self.tiles.held.take(holder[order], axis=0)
        rank, direct, tensor, padded = held[:, 8], self.direct[order], copies[:, 0], self.padded[order]
        before = np.cumsum(padded) - padded
        new = np.ones(len(rank), bool)
        new[1:] = (rank[1:] != rank[:-1]) | (direct[1:] != direct[:-1])
        filled = before - before[np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))]
        new[1:] |= direct[1:] | (filled[1:] // self.half != filled[:-1] // self.half)
        first = np.flatnonzero(new)
        stop = np.append(first[1:], len(new)).astype(np.int64)[: len(first)]
        copies[:, 1] = before - before[first][np.cumsum(new) - 1]
        size = (copies[:, 1] + padded)[stop - 1]
        size = np.where(direct[first], size, np.maximum(-(-size // PAGE) * PAGE, PAGE))
        buckets = np.column_stack([rank[first], size, direct[first], first, stop, tensor[stop - 1]])
        turn = np.lexsort((first, rank[first], tensor[stop - 1]))
        source = copies.copy()
        source[:, 4], source[:, 6] = held[:, 5], held[:, 7]
        source[:, 5] = held[:, 6] + (self.row[order] - held[:, 1]) * held[:, 7]
        source[:, 7] = self.column[order] - held[:, 3]
        return Parcels(buckets[turn], copies), source, rank

    def _turns(self, worker: int) -> Table:
        """Return which of those that hold it sends each piece. Replicas take turns, a share or half a bucket each."""
        kind, copies = self.tiles.kind[self.tile], self.tiles.copies[self.tile]
        order = np.argsort(kind, kind="stable")
        before = np.empty(len(order), np.int64)
        before[order] = np.cumsum(self.nbytes[order]) - self.nbytes[order]
        total = np.bincount(kind, self.nbytes).astype(np.int64)
        before -= (np.cumsum(total) - total)[kind]
        share = np.clip(-(-total[kind] // copies), 1, self.half)
        turns: Table = (before // share + worker) % copies
        return turns


def _of_rank(rank: int, outgoing: Sequence[_Outgoing]) -> Parcels:
    """Put together what a rank sends to all workers."""
    buckets, copies, size = [np.zeros((0, 6), np.int64)], [np.zeros((0, 8), np.int64)], 0
    for worker, (of_worker, source, begins) in enumerate(outgoing):
        low, high = begins[rank : rank + 2]
        own = of_worker[of_worker[:, 0] == rank]
        own[:, 0] = worker
        own[:, 3:5] += size - low
        buckets.append(own)
        copies.append(source[low:high])
        size += high - low
    table = np.concatenate(buckets)
    return Parcels(table[np.lexsort((table[:, 3], table[:, 0], table[:, 5]))], np.concatenate(copies))
