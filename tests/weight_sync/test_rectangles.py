"""Regions as loaders take them, cut into rectangles: a copy by these makes what the loader would have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def copied(source: torch.Tensor, part: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(The memory of ``into`` once the rectangles of ``part``, a view of ``source``, are copied, rectangles)."""
    from skyrl_megatron.weight_sync.rectangles import merged, rectangles, width_of

    width = width_of(source.shape)
    part = part.broadcast_to(into.shape)
    found = merged(
        sorted(
            rectangles(
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
    into.copy_(part)
    return torch.empty(0).set_(into.untyped_storage())


WHOLE = torch.arange(1.0, 1 + 4 * 6 * 10).view(4, 6, 10)
MATRIX = WHOLE.view(24, 10)
CASES = {
    "a whole tensor": (lambda: (MATRIX, MATRIX, torch.full((24, 10), -1.0)), 1),
    "a vector": (lambda: (MATRIX[0], MATRIX[0], torch.full((10,), -1.0)), 1),
    "rows of a vector": (lambda: (MATRIX[0].clone(), None, torch.full((4,), -1.0)), 1),
    "rows": (lambda: (MATRIX, MATRIX.narrow(0, 5, 7), torch.full((7, 10), -1.0)), 1),
    "columns": (lambda: (MATRIX, MATRIX.narrow(1, 3, 4), torch.full((24, 4), -1.0)), 1),
    "rows into the middle": (lambda: (MATRIX, MATRIX[:8], torch.full((20, 10), -1.0)[6:14]), 1),
    "one expert": (lambda: (WHOLE, WHOLE[2], torch.full((6, 10), -1.0)), 1),
    "half of each expert": (lambda: (WHOLE, WHOLE[:, 3:], torch.full((4, 3, 10), -1.0)), 4),
    "experts turned": (lambda: (WHOLE, WHOLE.transpose(1, 2), torch.full((4, 10, 6), -1.0)), None),
    "a matrix turned": (lambda: (MATRIX, MATRIX.t(), torch.full((10, 24), -1.0)), 1),
    "every other row": (lambda: (MATRIX, MATRIX[::2], torch.full((12, 10), -1.0)), None),
    "every third column": (lambda: (MATRIX, MATRIX[:, 1::3], torch.full((24, 3), -1.0)), None),
    "one element": (lambda: (MATRIX, MATRIX[3, 4], torch.full((), -1.0)), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_rectangles_copy_what_a_loader_does(name):
    make, count = CASES[name]
    source, part, into = make()
    part = source[2:6] if part is None else part
    memory, found = copied(source, part, into)
    assert torch.equal(memory, by_loader(part, into))
    assert count is None or found == count


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_slices(data):
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


def test_what_runs_over_the_end_of_a_row_is_refused():
    from skyrl_megatron.weight_sync.rectangles import rectangles

    with pytest.raises(ValueError, match="runs over the end of a row"):
        rectangles((3, 4), ((10, 1), 7), ((4, 1), 0), 10)
    with pytest.raises(ValueError, match="repeated"):
        rectangles((3, 4), ((0, 1), 0), ((4, 1), 0), 10)
