"""Strided regions of a tensor as rectangles of its rows and columns, each with the place that it is copied to.

A tensor of any rank is [rows, columns] here, as in ``source.as_rows``: its last dimension are the columns, a vector
has one. What an engine's loader takes of it (slices, one expert, a transposed matrix) is then one or several
rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

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
