"""Row-major ranges cut into boxes. Integers only.

A distributed optimizer owns a flat range of a parameter. A checkpoint stores boxes (offsets and sizes along every
axis). A range over an n-dimensional tensor is at most 2n - 1 boxes, each of them contiguous within the range::

    boxes((4, 3), 2, 8)  →  [0, 2:3]   [1:2, 0:3]   [2, 0:2]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous block: ``offsets`` and ``sizes`` per axis, ``start``: position of its first element when the
    tensor is flattened in row-major order."""

    start: int
    offsets: Index
    sizes: Index

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes(shape: Index, start: int, stop: int, max_numel: int | None = None) -> Iterator[Box]:
    """Yield the fewest boxes that make up elements ``[start, stop)`` of a flattened tensor, in order.

    With ``max_numel`` each box has at most so many elements.
    """
    for box in _boxes(shape, start, stop, 0):
        yield from _split(box, max_numel) if max_numel else (box,)


def _boxes(shape: Index, start: int, stop: int, base: int) -> Iterator[Box]:
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield Box(base, (0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _within_row(shape, first, start - first * row, stop - first * row, base)
        return
    if start % row:
        yield from _within_row(shape, first, start - first * row, row, base)
        first += 1
    whole = stop // row
    if whole > first:
        rest = (0,) * (len(shape) - 1)
        yield Box(base + first * row, (first, *rest), (whole - first, *shape[1:]))
    if stop % row:
        yield from _within_row(shape, whole, 0, stop - whole * row, base)


def _within_row(shape: Index, index: int, start: int, stop: int, base: int) -> Iterator[Box]:
    for box in _boxes(shape[1:], start, stop, base + index * math.prod(shape[1:])):
        yield Box(box.start, (index, *box.offsets), (1, *box.sizes))


def _split(box: Box, max_numel: int) -> Iterator[Box]:
    """Cut ``box`` into pieces of at most ``max_numel`` elements, cut along its first axis longer than 1."""
    if box.numel <= max_numel:
        yield box
        return
    axis = next(i for i, size in enumerate(box.sizes) if size > 1)
    inner = math.prod(box.sizes[axis + 1 :])
    step = max(1, max_numel // inner)
    for begin in range(0, box.sizes[axis], step):
        count = min(step, box.sizes[axis] - begin)
        offsets = (*box.offsets[:axis], box.offsets[axis] + begin, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], count, *box.sizes[axis + 1 :])
        yield from _split(Box(box.start + begin * inner, offsets, sizes), max_numel)
