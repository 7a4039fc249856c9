"""The reshard plan: for each pair of trainer rank and engine worker the copies between them, in buckets.

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

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import ALIGNMENT, PAGE, TensorMeta
from skyrl_megatron.weight_sync.slices import (
    COLUMN,
    COLUMNS,
    ROW,
    ROWS,
    TENSOR,
    Holdings,
    Parcels,
    Route,
    Table,
    Unroutable,
    named_ranks,
    rows_of,
    width_of,
)

# a tile's place in one number: tensor, first column, first row
_TENSOR_BITS, _COLUMN_BITS, _ROW_BITS = 21, 18, 24


class Tiles:
    """What is held, each tile once, with those that hold it."""

    def __init__(self, tensors: Sequence[TensorMeta], holdings: Sequence[Holdings]) -> None:
        numbers = {meta.name: number for number, meta in enumerate(tensors)}
        tables = []
        for rank, each in enumerate(holdings):
            own = np.array([numbers[meta.name] for meta in each.tensors], np.int64)
            columns = each.tiles
            tables.append(np.column_stack([own[columns[:, 0]], columns[:, 1:], np.full(len(columns), rank)]))
        held = np.concatenate(tables)
        if held[:, 0].max(initial=0) >> _TENSOR_BITS or held[:, 1].max(initial=0) >> _ROW_BITS:
            raise Unroutable(f"{len(tensors)} tensors, or one of more than {1 << _ROW_BITS} rows, are too many")
        if held[:, 3].max(initial=0) >> _COLUMN_BITS:
            raise Unroutable(f"a tensor of more than {1 << _COLUMN_BITS} columns is too wide")
        place = _place(held[:, 0], held[:, 3], held[:, 1])
        order = np.argsort(place, kind="stable")
        self.held = held[order]
        """[n, 9]: the columns of ``Holdings.tiles``, and the rank."""
        place = place[order]
        self.first: Table = _begins(place)
        """Of each tile, where those that hold it begin in :attr:`held`."""
        self.copies: Table = np.diff(self.first, append=len(place))
        self.tiles = self.held[self.first]
        self.columns = self.tiles.T.copy()
        """:attr:`tiles` by columns, which are read one by one."""
        self.place = place[self.first]
        self._check(tensors)
        self.bands = _begins(self.place >> _ROW_BITS)
        """The tiles that begin a band: those of the same columns of a tensor."""
        self.size: Table = np.diff(self.bands, append=len(self.place))
        """Tiles of each band."""
        self.of_tensor: Table = np.searchsorted(self.columns[0][self.bands], np.arange(len(tensors) + 1))
        """Of each tensor, where its bands begin, and where those of the last one end."""
        weights = np.random.default_rng(0).integers(1, 1 << 62, len(holdings))
        _, self.kind = np.unique(np.add.reduceat(weights[self.held[:, 8]], self.first), return_inverse=True)
        """Of each tile, a number that those held by the same ranks share."""

    def _check(self, tensors: Sequence[TensorMeta]) -> None:
        """Raise WeightSyncError unless every element of every tensor lies in one tile."""
        tensor, row, rows, column, columns = self.tiles[:, :5].T
        unlike = (np.repeat(self.tiles[:, [2, 4]], self.copies, axis=0) != self.held[:, [2, 4]]).any(1)
        if unlike.any():
            tile = int(np.searchsorted(self.first, unlike.argmax(), "right")) - 1
            raise self._overlap(tensors, tile, tile)
        follows = (tensor[1:] == tensor[:-1]) & (column[1:] == column[:-1])
        overlap = follows & ((row[1:] < row[:-1] + rows[:-1]) | (columns[1:] != columns[:-1]))
        overlap |= (tensor[1:] == tensor[:-1]) & ~follows & (column[1:] < column[:-1] + columns[:-1])
        if overlap.any():
            tile = int(overlap.argmax())
            raise self._overlap(tensors, tile, tile + 1)
        area = np.bincount(tensor, rows * columns, len(tensors)).astype(np.int64)
        sizes = np.array([rows_of(meta) * width_of(meta.shape) for meta in tensors], np.int64)
        for number in np.flatnonzero(area != sizes).tolist():
            raise WeightSyncError(
                f"{area[number]} of {sizes[number]} elements of {tensors[number].name} are held, by "
                f"{named_ranks(self.held[self.held[:, 0] == number, 8])}{self._gap(number, tensors[number])}"
            )

    def _overlap(self, tensors: Sequence[TensorMeta], one: int, other: int) -> WeightSyncError:
        """Return the error of two tiles that have elements in common, or of one that ranks hold in different sizes."""
        number, row, rows = self.tiles[other, :3].tolist()
        ranks = [self.held[self.first[tile] : self.first[tile] + self.copies[tile], 8] for tile in (one, other)]
        return WeightSyncError(
            f"rows {row} to {row + rows} of {tensors[number].name} are held in parts that overlap, by "
            f"{named_ranks(np.concatenate(ranks))}"
        )

    def _gap(self, number: int, meta: TensorMeta) -> str:
        """Name the first rows of a tensor that no rank holds, in words; empty where it lacks columns."""
        own = self.tiles[self.tiles[:, 0] == number]
        for column in np.unique(own[:, 3]):
            end = 0
            for row, rows in [*own[own[:, 3] == column, 1:3].tolist(), (rows_of(meta), 0)]:
                if row > end:
                    return f"; rows {end} to {row} by none"
                end = row + rows
        return ""

    def under(self, copies: Table) -> tuple[Table, Table]:
        """Return the pairs of (copy, tile) that have elements in common. ``copies``: columns of ``Route.copies``."""
        tensor, row, rows = copies[TENSOR], copies[ROW], copies[ROWS]
        which, band = spread(self.of_tensor[tensor], self.of_tensor[tensor + 1])
        low = self.bands[band]
        high = low + self.size[band]
        several = np.flatnonzero(self.size[band] > 1)
        if len(several):
            which_of, from_tile = which[several], low[several]
            column = self.columns[3][from_tile]
            place = _place(tensor[which_of], column, row[which_of])
            first = np.searchsorted(self.place, place, "right") - 1
            low[several] = np.maximum(first, from_tile)
            high[several] = np.searchsorted(self.place, place + rows[which_of] - 1, "right")
        pair, tile = spread(low, high)
        return which[pair], tile


def _place(tensor: Table, column: Table, row: Table) -> Table:
    return (tensor << (_COLUMN_BITS + _ROW_BITS)) | (column << _ROW_BITS) | row


def _begins(values: Table) -> Table:
    """Return where each run of equal values begins."""
    new = np.ones(len(values), bool)
    new[1:] = values[1:] != values[:-1]
    return np.flatnonzero(new).astype(np.int64)


def spread(low: Table, high: Table) -> tuple[Table, Table]:
    """Return (index, value) for every value of every range low … high."""
    count = np.maximum(high - low, 0)
    if (count == 1).all():
        return np.arange(len(count)), low
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + low[which]


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
