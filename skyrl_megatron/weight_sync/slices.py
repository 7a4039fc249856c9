"""Slices of tensors: which rank holds which rows, which engine worker copies which part where, and what one sends
another.

A tensor of any rank is [rows, columns] here, as in ``source.as_rows``: its last dimension are the columns, a vector
has one. What an engine's loader takes of it (slices, one expert, a transposed matrix) is then one or several
rectangles.

Both say it in rectangles of rows and columns of whole tensors, as rows of int64 tables, so that a plan of many million
copies is a matter of seconds. What is not made of such rectangles is :class:`Unroutable`, and travels as buckets that
every worker gets (``receiver.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.tensors import TensorShard

type Dim = tuple[int, int, int]
"""Size, step in the source, step in the target; steps in elements."""


class Rectangle(NamedTuple):
    """``target[offset + i · row_stride + j · column_stride] = source[row + i, column + j]``, in elements."""

    row: int
    rows: int
    column: int
    columns: int
    offset: int
    row_stride: int
    column_stride: int


def width_of(shape: Sequence[int]) -> int:
    """Return the columns of a tensor."""
    return shape[-1] if len(shape) > 1 else 1


def rectangles(
    shape: Sequence[int],
    source: tuple[Sequence[int], int],
    target: tuple[Sequence[int], int],
    width: int,
) -> list[Rectangle]:
    """Cut the copy of a region ``shape`` into rectangles. ``source``, ``target``: (strides, offset); ``width``:
    columns of the source. Raises ValueError for a region that is repeated, empty, or runs over the end of a row.
    """
    (from_strides, from_offset), (to_strides, to_offset) = source, target
    dims = [dim for dim in zip(shape, from_strides, to_strides, strict=True) if dim[0] != 1]
    if any(step == 0 for _, step, _ in dims) or 0 in shape:
        raise ValueError("a region that is repeated, or empty")
    rows = _joined([dim for dim in dims if dim[1] % width == 0])
    columns = _joined([dim for dim in dims if dim[1] % width])
    first_row, first_column = divmod(from_offset, width)
    if first_column + sum((size - 1) * step for size, step, _ in columns) >= width:
        raise ValueError("a region that runs over the end of a row")
    inner_rows, outer_rows = _inner(rows, width)
    inner_columns, outer_columns = _inner(columns, 1)
    found = []
    for behind, ahead in _places([*outer_rows, *outer_columns]):
        row, column = divmod(behind, width)
        found.append(
            Rectangle(
                first_row + row,
                inner_rows[0],
                first_column + column,
                inner_columns[0],
                to_offset + ahead,
                inner_rows[2],
                inner_columns[2],
            )
        )
    return found


def _joined(dims: Sequence[Dim]) -> list[Dim]:
    """Join dimensions that continue one another on both sides; the finest first."""
    joined: list[Dim] = []
    for size, behind, ahead in sorted(dims, key=lambda dim: dim[1]):
        if joined and (behind, ahead) == (joined[-1][0] * joined[-1][1], joined[-1][0] * joined[-1][2]):
            joined[-1] = (joined[-1][0] * size, *joined[-1][1:])
        else:
            joined.append((size, behind, ahead))
    return joined


def _inner(dims: Sequence[Dim], unit: int) -> tuple[Dim, Sequence[Dim]]:
    """Return the dimension that a rectangle runs along, and those that there is a rectangle for each index of."""
    if dims and dims[0][1] == unit:
        return dims[0], dims[1:]
    return (1, unit, 0), dims


def _places(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the source, offset in the target) for each index of ``dims``."""
    for index in product(*(range(size) for size, _, _ in reversed(dims))):
        steps = list(zip(index, reversed(dims), strict=True))
        yield sum(i * dim[1] for i, dim in steps), sum(i * dim[2] for i, dim in steps)


def merged(found: Sequence[Rectangle]) -> list[Rectangle]:
    """Join rectangles where one goes on in the next: rows of the same columns, evenly spaced in the target."""
    done: list[Rectangle] = []
    for each in found:
        if done and (whole := _continued(done[-1], each)) is not None:
            done[-1] = whole
        else:
            done.append(each)
    return done


def _continued(one: Rectangle, other: Rectangle) -> Rectangle | None:
    if (other.row, other.column, other.columns) != (one.row + one.rows, one.column, one.columns):
        return None
    if one.columns > 1 and one.column_stride != other.column_stride:
        return None
    step = one.row_stride if one.rows > 1 else other.row_stride if other.rows > 1 else other.offset - one.offset
    if (other.rows > 1 and other.row_stride != step) or other.offset != one.offset + one.rows * step:
        return None
    return one._replace(rows=one.rows + other.rows, row_stride=step)


def in_parts(rectangle: Rectangle, size: int) -> Iterator[tuple[int, Rectangle]]:
    """Yield (part, rectangle in it) of a rectangle in a target that is made of parts of ``size`` elements.

    Raises ValueError where one row goes into two.
    """
    step, reach = max(rectangle.row_stride, 1), (rectangle.columns - 1) * rectangle.column_stride
    row = 0
    while row < rectangle.rows:
        part, offset = divmod(rectangle.offset + row * rectangle.row_stride, size)
        count = min((size - 1 - reach - offset) // step + 1, rectangle.rows - row)
        if count < 1:
            raise ValueError("a row that goes into two parts of what it is copied to")
        yield part, rectangle._replace(row=rectangle.row + row, rows=count, offset=offset)
        row += count


type Table = NDArray[np.int64]
type FilledTensor = tuple[str, str, str, int, int]
"""Path of a module, name of its parameter or buffer, dtype, elements, and which of several equal parts along its first
dimension, as experts are; −1: all of it."""

# columns of Route.copies
TENSOR, TARGET, ROW, ROWS, COLUMN, COLUMNS, OFFSET, ROW_STRIDE, COLUMN_STRIDE = range(9)


NAMED_RANKS = 8
"""Those that a message names."""


class Unroutable(WeightSyncError):
    """Weights that cannot travel by routes, and why."""


@dataclass(frozen=True, slots=True)
class Route:
    """What one worker copies where: ``copies`` [n, 9], a rectangle of a tensor and its place in a target each
    (``rectangles.Rectangle``), in the order of the tensors."""

    targets: Sequence[FilledTensor]
    copies: Table

    @classmethod
    def of(cls, targets: Sequence[FilledTensor], copies: Sequence[Sequence[int]]) -> Route:
        """Make a route of rows of (tensor, target, *rectangle). Raises Unroutable when one element of a target is
        copied to twice, or an element beyond its end."""
        table = np.array(copies, np.int64).reshape(-1, 9)
        route = cls(targets, table[np.argsort(table[:, TENSOR], kind="stable")])
        route.check()
        return route

    @property
    def plain(self) -> tuple[list[FilledTensor], bytes]:
        """The route as it comes from a worker."""
        return list(self.targets), self.copies.tobytes()

    @classmethod
    def of_plain(cls, targets: Sequence[Sequence[Any]], copies: bytes) -> Route:
        """Undo :attr:`plain`."""
        named = [(str(path), str(name), str(dtype), int(size), int(part)) for path, name, dtype, size, part in targets]
        return cls(named, np.frombuffer(copies, np.int64).reshape(-1, 9))

    def covered(self) -> Table:
        """Count the elements of each target that something is copied to."""
        areas = self.copies[:, ROWS] * self.copies[:, COLUMNS]
        return np.bincount(self.copies[:, TARGET], areas, len(self.targets)).astype(np.int64)

    def check(self) -> None:
        """See :meth:`of`."""
        if (wrong := self.wrong()) is not None:
            target, element, what = wrong
            raise Unroutable(f"element {element} of {name_of(self.targets[target])} {what}")

    def wrong(self) -> tuple[int, int, str] | None:
        """Return a target, its element that is copied to twice or is beyond its end, and which of these."""
        targets, starts, lengths = _runs(self.copies)
        order = np.lexsort((starts, targets))
        targets, starts = targets[order], starts[order]
        ends = starts + lengths[order]
        sizes = np.array([size for *_, size, _ in self.targets], np.int64)
        twice = np.flatnonzero((targets[1:] == targets[:-1]) & (starts[1:] < ends[:-1]))
        beyond = np.flatnonzero((ends > sizes[targets]) | (starts < 0))
        for wrong, what in ((twice, "is copied to twice"), (beyond, "is beyond its end")):
            if len(wrong):
                return int(targets[wrong[0]]), max(int(starts[wrong[0]]), 0), what
        return None


def name_of(target: FilledTensor) -> str:
    """Name a target in a message."""
    path, name, _, _, part = target
    return f"{path}.{name}" + (f"[{part}]" if part >= 0 else "")


def named_ranks(ranks: Iterable[int]) -> str:
    """Name trainer ranks in a message."""
    numbers = sorted({int(rank) for rank in ranks})
    named = ", ".join(map(str, numbers[:NAMED_RANKS])) + (" …" if len(numbers) > NAMED_RANKS else "")
    return f"trainer rank{'s' if len(numbers) > 1 else ''} {named}" if numbers else "no trainer rank"


def _runs(copies: Table) -> tuple[Table, Table, Table]:
    """Return the stretches of memory that copies go to: (target, first element, elements) each."""
    rows, columns = copies[:, ROWS], copies[:, COLUMNS]
    offset, by_row, by_column = copies[:, OFFSET], copies[:, ROW_STRIDE], copies[:, COLUMN_STRIDE]
    turned = (by_column != 1) & (columns > 1) & ((by_row == 1) | (rows == 1))
    count, length = np.where(turned, columns, rows), np.where(turned, rows, columns)
    apart, along = np.where(turned, by_column, by_row), np.where(turned, by_row, by_column)
    whole = ((along == 1) | (length == 1)) & ((apart == length) | (count == 1))
    length, count = np.where(whole, length * count, length), np.where(whole, 1, count)
    spread = ~whole & (along != 1) & (length > 1)  # element by element
    inner = np.where(spread, length, 1)
    total = count * inner
    which = np.repeat(np.arange(len(copies)), total)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(total) - total, total)
    starts = offset[which] + nth // inner[which] * apart[which] + nth % inner[which] * along[which]
    return copies[which, TARGET], starts, np.where(spread, 1, length)[which]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one rank holds: ``tiles`` [n, 8], of a tensor (by its place in ``tensors``) the rectangle of rows and
    columns, and where its rows lie in the rank's shard: number of the shard, first row, rows from one to the next."""

    tensors: Sequence[TensorMeta]
    """Whole ones."""
    tiles: Table

    @classmethod
    def of(cls, shards: Sequence[TensorShard], own: Sequence[int]) -> Holdings:
        """List what this rank holds of ``shards``. ``own``: its number among the owners of each."""
        tensors: dict[str, int] = {}
        metadata: list[TensorMeta] = []
        tiles: list[tuple[int, ...]] = []
        for number, (shard, rank) in enumerate(zip(shards, own, strict=True)):
            meta = shard.meta
            if meta.name not in tensors:
                tensors[meta.name] = len(metadata)
                metadata.append(TensorMeta(meta.name, meta.dtype, meta.shape, position=meta.position))
            before = 0 if meta.rows is None else meta.first_byte // meta.row_nbytes
            held = [span for span in shard.ranges if span.owner == rank]
            for span in held:
                row, first, width = before + span.start, span.first, shard.local.shape[1]
                last = tiles[-1] if tiles else None
                if last and (last[0], last[1] + last[2], last[3:5], last[5], last[6] + last[2] * last[7]) == (
                    (tensors[meta.name], row, (span.column, width), number, first)
                ) and span.step in (last[7], 1) and last[7] == span.step:  # fmt: skip
                    tiles[-1] = (*last[:2], last[2] + span.count, *last[3:])
                else:
                    tiles.append((tensors[meta.name], row, span.count, span.column, width, number, first, span.step))
        return cls(metadata, np.array(tiles, np.int64).reshape(-1, 8))


def tensors_of(holdings: Sequence[Holdings]) -> list[TensorMeta]:
    """List the tensors of all ranks, each once, in the order in which they travel: that of the model in each pipeline
    stage, stages side by side. Raises WeightSyncError when ranks disagree about one."""
    found: dict[str, tuple[TensorMeta, int]] = {}
    for rank, each in enumerate(holdings):
        for number, meta in enumerate(each.tensors):
            place = meta.position if meta.position >= 0 else number
            own = TensorMeta(meta.name, meta.dtype, meta.shape, position=place)
            known, first = found.setdefault(meta.name, (own, rank))
            if (known.dtype, known.shape) != (meta.dtype, meta.shape):
                kinds = " and ".join(f"{list(one.shape)} {one.dtype}" for one in (known, meta))
                ranks = named_ranks([first, rank])
                raise WeightSyncError(f"{meta.name} is listed with different shapes or dtypes: {kinds} on {ranks}")
    return sorted((meta for meta, _ in found.values()), key=lambda meta: meta.position)


def rows_of(meta: TensorMeta) -> int:
    """Return the rows of a tensor, see ``rectangles.py``."""
    size = 1
    for length in meta.shape:
        size *= length
    return size // max(width_of(meta.shape), 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Copies of one bucket, evenly spaced."""

    copy: list[int]
    """The first of them, a row of :attr:`Parcels.copies`."""
    count: int
    bytes_apart: int
    """In the bucket, from one to the next."""
    apart: int
    """On this side, from one to the next: elements of a target, rows of a shard."""

    def piece(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """View the copies in the bytes of a bucket: [rows, columns], of several [count, rows, columns]."""
        _, at, rows, columns, *_ = self.copy
        size = rows * columns * dtype.itemsize
        whole = bucket[at : at + (self.count - 1) * self.bytes_apart + size].view(dtype)
        if self.count == 1:
            return whole.view(rows, columns)
        return whole.as_strided((self.count, rows, columns), (self.bytes_apart // dtype.itemsize, columns, 1))

    def of(self, first: Tensor, apart: int) -> Tensor:
        """View all of them where the first is. ``apart``: elements from one to the next."""
        if self.count == 1:
            return first
        return first.as_strided((self.count, *first.shape), (apart, *first.stride()))


@dataclass(frozen=True, slots=True)
class Parcels:
    """One side's buckets and the copies in them.

    ``buckets`` [b, 6]: the other side's number; bytes; whether it is one contiguous copy; first copy and the one after
    the last; the last copy's tensor. ``copies`` [n, 8]: tensor, first byte in the bucket, rows, columns, and of a
    sender the shard, first row, rows from one to the next, first column; of a receiver the target, offset, row stride,
    column stride.
    """

    buckets: Table
    copies: Table

    @property
    def plain(self) -> tuple[bytes, bytes]:
        """The parcels as they are sent to their side."""
        return self.buckets.tobytes(), self.copies.tobytes()

    @classmethod
    def of_plain(cls, buckets: bytes, copies: bytes) -> Parcels:
        """Undo :attr:`plain`."""
        return cls(np.frombuffer(buckets, np.int64).reshape(-1, 6), np.frombuffer(copies, np.int64).reshape(-1, 8))

    def runs(self) -> list[list[Run]]:
        """Return the copies of each bucket, joined where they are alike but for their places in the bucket and on this
        side, which are evenly spaced: a projection's rows of every expert."""
        steps = np.diff(self.copies, axis=0)
        alike = ~steps[:, [0, 2, 3, 4, 6, 7]].any(1)
        begins = np.ones(len(self.copies), bool)
        begins[1:] = ~alike
        begins[2:] |= alike[:-1] & (steps[1:, [1, 5]] != steps[:-1, [1, 5]]).any(1)
        begins[self.buckets[:, 3][self.buckets[:, 3] < self.buckets[:, 4]]] = True
        first = np.flatnonzero(begins)
        count = np.diff(first, append=len(begins))
        apart = np.zeros((len(first), 2), np.int64)
        apart[count > 1] = steps[first[count > 1]][:, [1, 5]]
        found = list(map(Run, self.copies[first].tolist(), count.tolist(), *apart.T.tolist()))
        bounds = np.searchsorted(first, self.buckets[:, 3:5]).tolist()
        return [found[begin:end] for begin, end in bounds]

    @property
    def peers(self) -> list[int]:
        """Those on the other side that buckets go to or come from."""
        return [int(peer) for peer in np.unique(self.buckets[:, 0])]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return int(self.buckets[:, 1].sum())


def check_parcels(parcels: Parcels, route: Route) -> None:
    """Raise Unroutable, naming the ranks that would send it, unless a worker's parcels fill what its route fills, each
    element once."""
    tensor, _, rows, columns, target, offset, by_row, by_column = parcels.copies.T
    none = np.zeros_like(rows)
    planned = Route(
        route.targets, np.column_stack([tensor, target, none, rows, none, columns, offset, by_row, by_column])
    )
    if len(target) and target.max() >= len(route.targets):
        raise Unroutable(
            f"target {target.max()} is planned, and the engine's worker has {len(route.targets)}: its layout is not "
            "the one that the plan was made for"
        )
    if (wrong := planned.wrong()) is not None:
        number, element, what = wrong
        raise Unroutable(f"element {element} of {name_of(route.targets[number])} {what}, {_from(parcels, number)}")
    for number, (found, needed) in enumerate(zip(planned.covered(), route.covered(), strict=True)):
        if found != needed:
            name = name_of(route.targets[number])
            raise Unroutable(f"{found} of {needed} elements of {name} are planned, {_from(parcels, number)}")


def _from(parcels: Parcels, target: int) -> str:
    """Name the ranks that parcels of a target come from, in words."""
    ranks = {
        rank
        for rank, _, _, first, stop, _ in parcels.buckets.tolist()
        if (parcels.copies[first:stop, 4] == target).any()
    }
    return f"from {named_ranks(ranks)}"
