"""What all ranks hold, each part once, to be looked up by rows and columns of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.rectangles import width_of
from skyrl_megatron.weight_sync.routes import ROW, ROWS, TENSOR, Holdings, Table, Unroutable, named_ranks, rows_of

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
