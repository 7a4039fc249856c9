"""Regions as loaders take them, cut into rectangles: a copy by these makes what the loader would have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch


def copied(source: torch.Tensor, part: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(The memory of ``into`` once the rectangles of ``part``, a view of ``source``, are copied, rectangles)."""
    import torch

    from skyrl_megatron.weight_sync.slices import merge_copies, strided_copies, width_of

    width = width_of(source.shape)
    part = part.broadcast_to(into.shape)
    found = merge_copies(
        sorted(
            strided_copies(
                tuple(into.shape),
                (part.stride(), part.storage_offset()),
                (into.stride(), into.storage_offset()),
                width,
            ),
            key=lambda each: (each.column, each.row),
        )
    )
    memory = torch.full((into.untyped_storage().nbytes() // 4,), -1.0)
    rows = source.reshape(-1, width)
    for each in found:
        place = memory.as_strided((each.rows, each.columns), (each.row_stride, each.column_stride), each.offset)
        assert (place == -1).all()
        place.copy_(rows[each.row : each.row + each.rows, each.column : each.column + each.columns])
    return memory, len(found)


def by_loader(part: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    import torch

    into.copy_(part)
    return torch.empty(0).set_(into.untyped_storage())


def cases() -> dict[str, tuple]:
    """(Tensor, part of it that a loader takes, what it is copied into, rectangles if they are known) by name."""
    import torch

    whole = torch.arange(1.0, 1 + 4 * 6 * 10).view(4, 6, 10)
    matrix = whole.view(24, 10)
    vector = matrix[0].clone()

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0)

    return {
        "a whole tensor": (matrix, matrix, empty(24, 10), 1),
        "a vector": (vector, vector, empty(10), 1),
        "rows of a vector": (vector, vector[2:6], empty(4), 1),
        "rows": (matrix, matrix.narrow(0, 5, 7), empty(7, 10), 1),
        "columns": (matrix, matrix.narrow(1, 3, 4), empty(24, 4), 1),
        "rows into the middle": (matrix, matrix[:8], empty(20, 10)[6:14], 1),
        "one expert": (whole, whole[2], empty(6, 10), 1),
        "half of each expert": (whole, whole[:, 3:], empty(4, 3, 10), 4),
        "experts turned": (whole, whole.transpose(1, 2), empty(4, 10, 6), None),
        "a matrix turned": (matrix, matrix.t(), empty(10, 24), 1),
        "every other row": (matrix, matrix[::2], empty(12, 10), None),
        "every third column": (matrix, matrix[:, 1::3], empty(24, 3), None),
        "one element": (matrix, matrix[3, 4], empty(), 1),
    }


def test_rectangles_copy_what_a_loader_does():
    import torch

    for name, (source, part, into, count) in cases().items():
        memory, found = copied(source, part, into)
        assert torch.equal(memory, by_loader(part, into)), name
        assert count is None or found == count, name


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_slices(data):
    import torch

    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    source = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    part = source
    for dim, length in enumerate(shape):
        start = data.draw(st.integers(0, length - 1))
        step = data.draw(st.integers(1, 2))
        part = part.narrow(dim, start, data.draw(st.integers(1, length - start)))
        part = part[(slice(None),) * dim + (slice(None, None, step),)]
    order = data.draw(st.permutations(range(len(shape))))
    part = part.permute(order)
    into = torch.full([length + 1 for length in part.shape], -1.0)[tuple(slice(0, length) for length in part.shape)]
    memory, _ = copied(source, part, into)
    assert torch.equal(memory, by_loader(part, into))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_parts_of_a_target(data):
    """Cut where a part ends, a rectangle fills the same elements; one whose row goes into two parts is refused."""
    from skyrl_megatron.weight_sync.slices import StridedCopy, split_by_part

    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    turned, size = data.draw(st.booleans()), data.draw(st.integers(4, 24))
    strides = (1, rows + data.draw(st.integers(0, 2))) if turned else (columns + data.draw(st.integers(0, 2)), 1)
    whole = StridedCopy(3, rows, 1, columns, data.draw(st.integers(0, 30)), *strides)

    def elements(each: StridedCopy, before: int = 0) -> dict[tuple[int, int], int]:
        return {
            (each.row + i, each.column + j): before + each.offset + i * each.row_stride + j * each.column_stride
            for i in range(each.rows)
            for j in range(each.columns)
        }

    expected = elements(whole)
    across = any(len({expected[3 + i, 1 + j] // size for j in range(columns)}) > 1 for i in range(rows))
    if across:
        with pytest.raises(ValueError, match="two parts"):
            list(split_by_part(whole, size))
        return
    found: dict[tuple[int, int], int] = {}
    for part, each in split_by_part(whole, size):
        inside = elements(each, part * size)
        assert {place // size for place in inside.values()} == {part} and not inside.keys() & found.keys()
        found |= inside
    assert found == expected


def test_what_runs_over_the_end_of_a_row_is_refused():
    from skyrl_megatron.weight_sync.slices import strided_copies

    with pytest.raises(ValueError, match="crosses the end of a row"):
        strided_copies((3, 4), ((10, 1), 7), ((4, 1), 0), 10)
    with pytest.raises(ValueError, match="repeated"):
        strided_copies((3, 4), ((0, 1), 0), ((4, 1), 0), 10)
