"""The tables of the reshard plan: what each trainer rank holds, what each engine worker needs, and what they send.

- :class:`SourceMap`: the slices that a trainer rank holds.
- :class:`TargetMap`: the copies that an engine worker makes into its parameters.
- :class:`TransferList`: the buckets that one side sends or receives.

Every tensor is viewed as [rows, columns], as in ``tensors.as_rows``: the last dimension is the columns, and a vector
has one column. A slice is a rectangle of rows and columns. Whatever an engine's loader reads of a tensor (a range, one
expert, a transposed matrix) is one or several such slices.

All tables are int64 arrays with one slice per row, so that a plan of millions of copies takes seconds. Weights that
cannot be described by slices raise :class:`ReshardUnsupported`; they travel in buckets that every worker receives
(``buckets.py``).
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
"""Size, stride in the source, stride in the target; strides in elements."""


class StridedCopy(NamedTuple):
    """``target[offset + i · row_stride + j · column_stride] = source[row + i, column + j]``, in elements."""

    row: int
    rows: int
    column: int
    columns: int
    offset: int
    row_stride: int
    column_stride: int


def width_of(shape: Sequence[int]) -> int:
    """Return the number of columns of a tensor."""
    return shape[-1] if len(shape) > 1 else 1


def strided_copies(
    shape: Sequence[int],
    source: tuple[Sequence[int], int],
    target: tuple[Sequence[int], int],
    width: int,
) -> list[StridedCopy]:
    """Split the copy of a region of ``shape`` into strided copies. ``source``, ``target``: (strides, offset);
    ``width``: columns of the source. Raises ValueError for a region that is repeated, empty, or crosses the end of a
    row.
    """
    (from_strides, from_offset), (to_strides, to_offset) = source, target
    # strides of dimensions of size 1 are arbitrary, and would break the joins below
    dims = [dim for dim in zip(shape, from_strides, to_strides, strict=True) if dim[0] != 1]
    if any(step == 0 for _, step, _ in dims) or 0 in shape:
        raise ValueError("the loader reads a region that is repeated or empty")
    rows = _joined([dim for dim in dims if dim[1] % width == 0])
    columns = _joined([dim for dim in dims if dim[1] % width])
    first_row, first_column = divmod(from_offset, width)
    if first_column + sum((size - 1) * step for size, step, _ in columns) >= width:
        raise ValueError("the loader reads a region that crosses the end of a row")
    inner_rows, outer_rows = _inner(rows, width)
    inner_columns, outer_columns = _inner(columns, 1)
    copies = []
    for source_offset, target_offset in _offsets([*outer_rows, *outer_columns]):
        row, column = divmod(source_offset, width)
        copies.append(
            StridedCopy(
                first_row + row,
                inner_rows[0],
                first_column + column,
                inner_columns[0],
                to_offset + target_offset,
                inner_rows[2],
                inner_columns[2],
            )
        )
    return copies


def _joined(dims: Sequence[Dim]) -> list[Dim]:
    """Join dimensions that are contiguous in the source and in the target. The smallest stride comes first."""
    joined: list[Dim] = []
    for size, source_step, target_step in sorted(dims, key=lambda dim: dim[1]):
        if joined and (source_step, target_step) == (joined[-1][0] * joined[-1][1], joined[-1][0] * joined[-1][2]):
            joined[-1] = (joined[-1][0] * size, *joined[-1][1:])
        else:
            joined.append((size, source_step, target_step))
    return joined


def _inner(dims: Sequence[Dim], unit: int) -> tuple[Dim, Sequence[Dim]]:
    """Return the dimension that one strided copy covers, and the dimensions that need one copy per index."""
    if dims and dims[0][1] == unit:
        return dims[0], dims[1:]
    return (1, unit, 0), dims


def _offsets(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the source, offset in the target) for each index of ``dims``."""
    for index in product(*(range(size) for size, _, _ in reversed(dims))):
        steps = list(zip(index, reversed(dims), strict=True))
        yield sum(i * dim[1] for i, dim in steps), sum(i * dim[2] for i, dim in steps)


def merge_copies(found: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Join copies that continue one another: consecutive rows of the same columns, evenly spaced in the target."""
    done: list[StridedCopy] = []
    for each in found:
        if done and (whole := _continued(done[-1], each)) is not None:
            done[-1] = whole
        else:
            done.append(each)
    return done


def _continued(one: StridedCopy, other: StridedCopy) -> StridedCopy | None:
    if (other.row, other.column, other.columns) != (one.row + one.rows, one.column, one.columns):
        return None
    if one.columns > 1 and one.column_stride != other.column_stride:
        return None
    step = one.row_stride if one.rows > 1 else other.row_stride if other.rows > 1 else other.offset - one.offset
    if (other.rows > 1 and other.row_stride != step) or other.offset != one.offset + one.rows * step:
        return None
    return one._replace(rows=one.rows + other.rows, row_stride=step)


def split_by_part(whole: StridedCopy, size: int) -> Iterator[tuple[int, StridedCopy]]:
    """Yield (part, copy into it) of a copy into a target that consists of parts of ``size`` elements.

    Raises ValueError if a row crosses from one part to the next.
    """
    # a copy of one row has stride 0
    step, reach = max(whole.row_stride, 1), (whole.columns - 1) * whole.column_stride
    row = 0
    while row < whole.rows:
        part, offset = divmod(whole.offset + row * whole.row_stride, size)
        count = min((size - 1 - reach - offset) // step + 1, whole.rows - row)
        if count < 1:
            raise ValueError("the loader copies one row into two parts of its target")
        yield part, whole._replace(row=whole.row + row, rows=count, offset=offset)
        row += count


type Table = NDArray[np.int64]
type TargetTensor = tuple[str, str, str, int, int]
"""Path of a module, name of its parameter or buffer, dtype, number of elements, and the number of the part (one expert
along the first dimension); −1: the whole tensor."""

# columns of TargetMap.copies
TENSOR, TARGET, ROW, ROWS, COLUMN, COLUMNS, OFFSET, ROW_STRIDE, COLUMN_STRIDE = range(9)


NAMED_RANKS = 8
"""Maximum number of ranks that a message names."""


class ReshardUnsupported(WeightSyncError):
    """The weights cannot be sent by a reshard plan; the message says why."""


@dataclass(frozen=True, slots=True)
class TargetMap:
    """The copies that one worker makes: ``copies`` [n, 9], in the order of the tensors. Each row is (tensor, target,
    *:class:`StridedCopy`)."""

    targets: Sequence[TargetTensor]
    copies: Table

    @classmethod
    def of(cls, targets: Sequence[TargetTensor], copies: Sequence[Sequence[int]]) -> TargetMap:
        """Make a target map from rows of (tensor, target, *StridedCopy). Raises ReshardUnsupported if an element of a
        target is copied to twice, or is beyond its end."""
        table = np.array(copies, np.int64).reshape(-1, 9)
        target_map = cls(targets, table[np.argsort(table[:, TENSOR], kind="stable")])
        target_map.check()
        return target_map

    @property
    def wire(self) -> tuple[list[TargetTensor], bytes]:
        """The form in which a worker returns it over RPC."""
        return list(self.targets), self.copies.tobytes()

    @classmethod
    def from_wire(cls, targets: Sequence[Sequence[Any]], copies: bytes) -> TargetMap:
        """Undo :attr:`wire`."""
        named = [(str(path), str(name), str(dtype), int(size), int(part)) for path, name, dtype, size, part in targets]
        return cls(named, np.frombuffer(copies, np.int64).reshape(-1, 9))

    def covered(self) -> Table:
        """Return the number of elements of each target that copies fill, [targets] int64."""
        areas = self.copies[:, ROWS] * self.copies[:, COLUMNS]
        return np.bincount(self.copies[:, TARGET], areas, len(self.targets)).astype(np.int64)

    def check(self) -> None:
        """See :meth:`of`."""
        if (wrong := self.first_fault()) is not None:
            target, element, what = wrong
            raise ReshardUnsupported(f"element {element} of {target_name(self.targets[target])} {what}")

    def first_fault(self) -> tuple[int, int, str] | None:
        """Return (target, element, what is wrong) of the first element that is copied to twice or is beyond the
        end."""
        targets, starts, lengths = _runs(self.copies)
        order = np.lexsort((starts, targets))
        targets, starts = targets[order], starts[order]
        ends = starts + lengths[order]
        sizes = np.array([size for *_, size, _ in self.targets], np.int64)
        # sorted by start, so that ranges which overlap are neighbours
        twice = np.flatnonzero((targets[1:] == targets[:-1]) & (starts[1:] < ends[:-1]))
        beyond = np.flatnonzero((ends > sizes[targets]) | (starts < 0))
        for wrong, what in ((twice, "is copied to twice"), (beyond, "is beyond its end")):
            if len(wrong):
                return int(targets[wrong[0]]), max(int(starts[wrong[0]]), 0), what
        return None


def target_name(target: TargetTensor) -> str:
    """Name a target in a message."""
    path, name, _, _, part = target
    return f"{path}.{name}" + (f"[{part}]" if part >= 0 else "")


def named_ranks(ranks: Iterable[int]) -> str:
    """Name trainer ranks in a message."""
    numbers = sorted({int(rank) for rank in ranks})
    named = ", ".join(map(str, numbers[:NAMED_RANKS])) + (" …" if len(numbers) > NAMED_RANKS else "")
    return f"trainer rank{'s' if len(numbers) > 1 else ''} {named}" if numbers else "no trainer rank"


def _runs(copies: Table) -> tuple[Table, Table, Table]:
    """Return the contiguous ranges of memory that copies write: (target, first element, number of elements) each."""
    rows, columns = copies[:, ROWS], copies[:, COLUMNS]
    offset, by_row, by_column = copies[:, OFFSET], copies[:, ROW_STRIDE], copies[:, COLUMN_STRIDE]
    # Copies into transposed memory are contiguous along columns. Read by rows, they would be as many ranges as
    # elements.
    transposed = (by_column != 1) & (columns > 1) & ((by_row == 1) | (rows == 1))
    count, length = np.where(transposed, columns, rows), np.where(transposed, rows, columns)
    apart, along = np.where(transposed, by_column, by_row), np.where(transposed, by_row, by_column)
    contiguous = ((along == 1) | (length == 1)) & ((apart == length) | (count == 1))
    length, count = np.where(contiguous, length * count, length), np.where(contiguous, 1, count)
    spread = ~contiguous & (along != 1) & (length > 1)  # element by element
    inner = np.where(spread, length, 1)
    total = count * inner
    which = np.repeat(np.arange(len(copies)), total)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(total) - total, total)
    starts = offset[which] + nth // inner[which] * apart[which] + nth % inner[which] * along[which]
    return copies[which, TARGET], starts, np.where(spread, 1, length)[which]


@dataclass(frozen=True, slots=True)
class SourceMap:
    """The slices that one rank holds: ``slices`` [n, 8]. Each row is (index in ``tensors``, first row, rows, first
    column, columns) of the whole tensor, then (number of the shard, first row, row step) in this rank's shards."""

    tensors: Sequence[TensorMeta]
    """Metadata of the whole tensors."""
    slices: Table

    @classmethod
    def of(cls, shards: Sequence[TensorShard], own: Sequence[int]) -> SourceMap:
        """List the slices that this rank holds of ``shards``. ``own``: this rank's number among the owners of each
        shard."""
        tensors: dict[str, int] = {}
        metadata: list[TensorMeta] = []
        slices: list[tuple[int, ...]] = []
        for number, (shard, rank) in enumerate(zip(shards, own, strict=True)):
            meta = shard.meta
            if meta.name not in tensors:
                tensors[meta.name] = len(metadata)
                metadata.append(TensorMeta(meta.name, meta.dtype, meta.shape, position=meta.position))
            before = 0 if meta.rows is None else meta.first_byte // meta.row_nbytes
            held = [span for span in shard.ranges if span.owner == rank]
            for span in held:
                row, first, width = before + span.start, span.first, shard.local.shape[1]
                last = slices[-1] if slices else None
                if last and (last[0], last[1] + last[2], last[3:5], last[5], last[6] + last[2] * last[7]) == (
                    (tensors[meta.name], row, (span.column, width), number, first)
                ) and span.step in (last[7], 1) and last[7] == span.step:  # fmt: skip
                    slices[-1] = (*last[:2], last[2] + span.count, *last[3:])
                else:
                    slices.append((tensors[meta.name], row, span.count, span.column, width, number, first, span.step))
        return cls(metadata, np.array(slices, np.int64).reshape(-1, 8))


def tensors_of(source_maps: Sequence[SourceMap]) -> list[TensorMeta]:
    """List the tensors of all ranks, each once, in the order in which they are sent: model order within a pipeline
    stage, with the stages interleaved. Raises WeightSyncError if ranks disagree about a shape or dtype."""
    listed: dict[str, tuple[TensorMeta, int]] = {}
    for rank, source_map in enumerate(source_maps):
        for number, meta in enumerate(source_map.tensors):
            position = meta.position if meta.position >= 0 else number
            whole_tensor = TensorMeta(meta.name, meta.dtype, meta.shape, position=position)
            first_meta, first = listed.setdefault(meta.name, (whole_tensor, rank))
            if (first_meta.dtype, first_meta.shape) != (meta.dtype, meta.shape):
                kinds = " and ".join(f"{list(one.shape)} {one.dtype}" for one in (first_meta, meta))
                ranks = named_ranks([first, rank])
                raise WeightSyncError(
                    f"{meta.name} is listed with different shapes or dtypes: {kinds} on {ranks}; all ranks must load "
                    "one model in one dtype"
                )
    # Positions repeat between pipeline stages, and sorting is stable: this interleaves the stages, so that all
    # of them send at once.
    return sorted((meta for meta, _ in listed.values()), key=lambda meta: meta.position)


def rows_of(meta: TensorMeta) -> int:
    """Return the number of rows of a tensor viewed as [rows, columns]."""
    size = 1
    for length in meta.shape:
        size *= length
    return size // max(width_of(meta.shape), 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Evenly spaced copies within one bucket."""

    copy: list[int]
    """The first copy, a row of :attr:`TransferList.copies`."""
    count: int
    bytes_stride: int
    """Bytes of the bucket from one copy to the next."""
    stride: int
    """Distance from one copy to the next on this side: elements of a target, or rows of a shard."""

    def piece(self, bucket: Tensor, dtype: torch.dtype) -> Tensor:
        """View the copies in the bytes of a bucket: [rows, columns], or [count, rows, columns] if there are
        several."""
        _, at, rows, columns, *_ = self.copy
        size = rows * columns * dtype.itemsize
        whole = bucket[at : at + (self.count - 1) * self.bytes_stride + size].view(dtype)
        if self.count == 1:
            return whole.view(rows, columns)
        return whole.as_strided((self.count, rows, columns), (self.bytes_stride // dtype.itemsize, columns, 1))

    def of(self, first: Tensor, stride: int) -> Tensor:
        """Extend the view of the first copy, [rows, columns], to all copies, [count, rows, columns]; one copy stays as
        it is. ``stride``: elements from one copy to the next."""
        if self.count == 1:
            return first
        return first.as_strided((self.count, *first.shape), (stride, *first.stride()))


@dataclass(frozen=True, slots=True)
class TransferList:
    """The send list of a trainer rank, or the receive list of an engine worker: buckets and the copies in them.

    ``buckets`` [b, 6]: number of the peer; bytes; whether the bucket is one contiguous copy; first copy; one past the
    last copy; tensor of the last copy. ``copies`` [n, 8]: tensor, first byte in the bucket, rows, columns; then in a
    send list the shard, first row, row step and first column, in a receive list the target, offset, row stride and
    column stride.
    """

    buckets: Table
    copies: Table

    @property
    def wire(self) -> tuple[bytes, bytes]:
        """The form in which it is sent to its rank or worker."""
        return self.buckets.tobytes(), self.copies.tobytes()

    @classmethod
    def from_wire(cls, buckets: bytes, copies: bytes) -> TransferList:
        """Undo :attr:`wire`."""
        return cls(np.frombuffer(buckets, np.int64).reshape(-1, 6), np.frombuffer(copies, np.int64).reshape(-1, 8))

    def runs(self) -> list[list[Run]]:
        """Return the copies of each bucket. Copies of equal shape that are evenly spaced, such as a projection's rows
        of every expert, are joined to one run."""
        steps = np.diff(self.copies, axis=0)
        alike = ~steps[:, [0, 2, 3, 4, 6, 7]].any(1)
        begins = np.ones(len(self.copies), bool)
        # a run continues while the distance stays the same: the second difference is 0
        begins[1:] = ~alike
        begins[2:] |= alike[:-1] & (steps[1:, [1, 5]] != steps[:-1, [1, 5]]).any(1)
        begins[self.buckets[:, 3][self.buckets[:, 3] < self.buckets[:, 4]]] = True
        first = np.flatnonzero(begins)
        count = np.diff(first, append=len(begins))
        apart = np.zeros((len(first), 2), np.int64)
        apart[count > 1] = steps[first[count > 1]][:, [1, 5]]
        runs = list(map(Run, self.copies[first].tolist(), count.tolist(), *apart.T.tolist()))
        bounds = np.searchsorted(first, self.buckets[:, 3:5]).tolist()
        return [runs[begin:end] for begin, end in bounds]

    @property
    def peers(self) -> list[int]:
        """The numbers of the workers or ranks that buckets go to or come from."""
        return [int(peer) for peer in np.unique(self.buckets[:, 0])]

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return int(self.buckets[:, 1].sum())


def check_transfers(transfers: TransferList, target_map: TargetMap) -> None:
    """Check that a worker's receive list fills the elements of its target map, each once. Raises ReshardUnsupported,
    which names the target and the ranks that would send to it."""
    tensor, _, rows, columns, target, offset, by_row, by_column = transfers.copies.T
    none = np.zeros_like(rows)
    planned = TargetMap(
        target_map.targets, np.column_stack([tensor, target, none, rows, none, columns, offset, by_row, by_column])
    )
    if len(target) and target.max() >= len(target_map.targets):
        raise ReshardUnsupported(
            f"the plan has target {target.max()}, but the engine's worker has only {len(target_map.targets)} targets: "
            "the plan was made for another layout"
        )
    if (wrong := planned.first_fault()) is not None:
        number, element, what = wrong
        raise ReshardUnsupported(
            f"element {element} of {target_name(target_map.targets[number])} {what}, {_from(transfers, number)}"
        )
    for number, (filled, needed) in enumerate(zip(planned.covered(), target_map.covered(), strict=True)):
        if filled != needed:
            name = target_name(target_map.targets[number])
            raise ReshardUnsupported(
                f"the plan sends {filled} of {needed} elements of {name}, {_from(transfers, number)}"
            )


def _from(transfers: TransferList, target: int) -> str:
    """Name the ranks that send to a target, for a message."""
    ranks = {
        rank
        for rank, _, _, first, stop, _ in transfers.buckets.tolist()
        if (transfers.copies[first:stop, 4] == target).any()
    }
    return f"from {named_ranks(ranks)}"
