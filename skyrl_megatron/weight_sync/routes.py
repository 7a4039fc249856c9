"""Who holds what, and who needs what: the two tables that a plan of copies is joined from (``route_plan.py``).

Both say it in rectangles of rows and columns of whole tensors, as rows of int64 tables, so that a plan of many million
copies is a matter of seconds. What is not made of such rectangles is :class:`Unroutable`, and travels as buckets that
every worker gets (``receiver.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.rectangles import width_of
from skyrl_megatron.weight_sync.source import TensorShard

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
