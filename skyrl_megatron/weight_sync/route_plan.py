"""The plan of a sync by routes: for each pair of trainer rank and engine worker the copies between them, in buckets.

Joined from what ranks hold and what workers need (``routes.py``), a pure function. Each element that a worker needs
comes to it once, from one of the ranks that hold it; replicas take turns, so that they share the work. All buckets are
in one order, and every rank and worker goes through its own in that order, so that none waits for another in a circle.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from skyrl_megatron.weight_sync.bucket import ALIGNMENT, PAGE, TensorMeta
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.routes import (
    COLUMN,
    COLUMNS,
    ROW,
    ROWS,
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


@dataclass(frozen=True, slots=True)
class Beside:
    """Which rank is on the device of each worker, and how many ranks a node has."""

    ranks: Sequence[int]
    per_node: int

    def nearest(self, tiles: Tiles, worker: int) -> tuple[Table, Table, Table]:
        """Return for each kind of tile how many of its holders are nearest to a worker, where their places among the
        holders begin in the last table, and that: the rank on its device, else those of its node, else all."""
        own = self.ranks[worker]
        _, examples = np.unique(tiles.kind, return_index=True)
        found = []
        for first, copies in zip(tiles.first[examples].tolist(), tiles.copies[examples].tolist(), strict=True):
            rank = tiles.held[first : first + copies, 8]
            far = np.where(rank == own, 0, np.where(rank // self.per_node == own // self.per_node, 1, 2))
            found.append(np.flatnonzero(far == far.min()))
        count = np.array([len(each) for each in found], np.int64)
        return count, np.cumsum(count) - count, np.concatenate(found) if found else count


def join(
    tensors: Sequence[TensorMeta],
    holdings: Sequence[Holdings],
    routes: Sequence[Route],
    bucket_bytes: int,
    beside: Beside | None = None,
) -> RoutePlan:
    """Join what ranks hold with what workers need of ``tensors``, which routes number them by. ``beside``: a worker
    gets what several ranks hold from the nearest.

    Raises WeightSyncError where ranks do not hold all of a tensor, or hold parts that overlap: that is a fault, which
    no other path makes good. Raises Unroutable for more ranks or larger tensors than a plan counts.
    """
    if len(holdings) > MOST_RANKS:
        raise Unroutable(f"{len(holdings)} ranks are more than {MOST_RANKS}")
    tiles = Tiles(tensors, holdings)
    itemsize = np.array([meta.torch_dtype.itemsize for meta in tensors], np.int64)
    kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(meta.dtype for meta in tensors))}
    dtypes = np.array([kinds[meta.dtype] for meta in tensors], np.int64)
    names = {name: number for number, name in enumerate(dict.fromkeys(meta.adapter for meta in tensors))}
    adapters = np.array([names[meta.adapter] for meta in tensors], np.int64)
    alike: dict[bytes, list[tuple[Route, list[int]]]] = {}  # workers with equal routes need equal pieces
    for worker, route in enumerate(routes):
        known = alike.setdefault(route.copies.sum(0).tobytes(), [])
        same = next((each for first, each in known if _equal(first, route)), None)
        if same is None:
            known.append((route, [worker]))
        else:
            same.append(worker)

    def pieces_of(route: Route) -> _Pieces:
        return _Pieces(tiles, route, itemsize, dtypes, kinds, adapters, bucket_bytes)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy lets other threads go on while it computes
        distinct = list(itertools.chain.from_iterable(alike.values()))
        pieces = pool.map(pieces_of, [route for route, _ in distinct])
        of = {worker: each for each, (_, own) in zip(pieces, distinct, strict=True) for worker in own}
        found = list(pool.map(lambda worker: of.pop(worker).of_worker(worker, beside), range(len(routes))))
        begins = range(len(holdings) + 1)
        outgoing = [(own.buckets, copies, np.searchsorted(ranks, begins)) for own, copies, ranks in found]
        of_ranks = pool.map(lambda rank: _of_rank(rank, outgoing), range(len(holdings)))
        return RoutePlan(list(of_ranks), [own for own, _, _ in found])


def _equal(one: Route, other: Route) -> bool:
    same = one.targets is other.targets or one.targets == other.targets
    return same and np.array_equal(one.copies, other.copies)


class _Pieces:
    """What workers of one route need, cut where tiles end and where a bucket is full."""

    def __init__(
        self,
        tiles: Tiles,
        route: Route,
        itemsize: Table,
        dtypes: Table,
        kinds: dict[str, int],
        adapters: Table,
        bucket_bytes: int,
    ) -> None:
        self.tiles, self.half, self.adapters = tiles, bucket_bytes // 2, adapters
        table = route.copies.T.copy()
        which, tile = tiles.under(table)
        copies, (_, first, held_rows, first_column, held_columns) = table[:, which], tiles.columns[:5, tile]
        row = np.maximum(copies[ROW], first)
        rows = np.minimum(copies[ROW] + copies[ROWS], first + held_rows) - row
        column = np.maximum(copies[COLUMN], first_column)
        columns = np.minimum(copies[COLUMN] + copies[COLUMNS], first_column + held_columns) - column
        size = itemsize[copies[TENSOR]]
        pieces = [tile, row, rows, column, columns, columns * size, *copies]
        some = (rows > 0) & (columns > 0)
        pieces = self._cut(pieces if some.all() else [each[some] for each in pieces])
        self.tile, self.row, rows, self.column, columns, row_bytes, *of_route = pieces
        tensor, target, from_row, _, from_column, _, into, by_row, by_column = of_route
        size = itemsize[tensor]
        self.nbytes = rows * row_bytes
        self.padded = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        offset = into + (self.row - from_row) * by_row + (self.column - from_column) * by_column
        self.copies = np.column_stack(
            [tensor, np.zeros_like(tensor), rows, columns, target, offset, by_row, by_column]
        )
        """The columns of ``Parcels.copies``, without places in buckets."""
        self.first, self.holders, self.shares = tiles.first[self.tile], tiles.copies[self.tile], self._shares()
        self.direct = self.nbytes >= bucket_bytes // DIRECT_FRACTION
        large = np.flatnonzero(self.direct)
        whole_rows = (columns == tiles.columns[4, self.tile]) & ((tiles.columns[7, self.tile] == 1) | (rows == 1))
        in_place = ((by_column == 1) | (columns == 1)) & ((by_row == columns) | (rows == 1))
        aligned = (self.nbytes % PAGE == 0) & (offset * size % 8 == 0)
        types = [kinds.get(route.targets[number][2], -1) for number in target[large].tolist()]
        self.direct[large] = (whole_rows & in_place & aligned)[large] & (dtypes[tensor[large]] == types)

    def _cut(self, pieces: list[Table]) -> list[Table]:
        """Cut pieces (tile, row, rows, column, columns, bytes of a row, …; [n] each) by rows into those of half a
        bucket."""
        row_bytes, rows = pieces[5], pieces[2]
        if len(row_bytes) and row_bytes.max() > self.half:
            raise Unroutable(f"a row of {row_bytes.max()} bytes does not fit into half a bucket")
        most = np.maximum(self.half // row_bytes, 1)
        if (rows <= most).all():
            return pieces
        which, nth = spread(np.zeros(len(rows), np.int64), -(-rows // most))
        cut, most = [each[which] for each in pieces], most[which]
        cut[1] += nth * most
        cut[2] = np.minimum(most, cut[2] - nth * most)
        return cut

    def of_worker(self, worker: int, beside: Beside | None) -> tuple[Parcels, Table, Table]:
        """Return what a worker receives, the copies of its buckets as their senders make them, rank after rank, and
        the rank of each."""
        if beside is None:
            holder = self.first + (self.shares + worker) % self.holders
        else:
            (count, begins, places), kind = beside.nearest(self.tiles, worker), self.tiles.kind[self.tile]
            holder = self.first + places[begins[kind] + (self.shares + worker) % count[kind]]
        rank = self.tiles.held[holder, 8]
        order = np.argsort((2 * rank + self.direct).astype(np.uint16), kind="stable")  # sorted by radix
        copies, held = self.copies.take(order, axis=0), self.tiles.held.take(holder[order], axis=0)
        rank, direct, tensor, padded = held[:, 8], self.direct[order], copies[:, 0], self.padded[order]
        before = np.cumsum(padded) - padded
        new = np.ones(len(rank), bool)
        adapter = self.adapters[tensor]  # a bucket is of one adapter: not all of them travel in every sync
        new[1:] = (rank[1:] != rank[:-1]) | (direct[1:] != direct[:-1]) | (adapter[1:] != adapter[:-1])
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

    def _shares(self) -> Table:
        """Return which share each piece lies in; replicas take turns with shares, of half a bucket at most."""
        kind, copies = self.tiles.kind[self.tile], self.tiles.copies[self.tile]
        order = np.argsort(kind, kind="stable")
        before = np.empty(len(order), np.int64)
        before[order] = np.cumsum(self.nbytes[order]) - self.nbytes[order]
        total = np.bincount(kind, self.nbytes).astype(np.int64)
        before -= (np.cumsum(total) - total)[kind]
        shares: Table = before // np.clip(-(-total[kind] // copies), 1, self.half)
        return shares


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
