"""Flat ranges as boxes: every element exactly once, in order, and few boxes."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(deadline=None)  # the first example imports Megatron
@given(shapes, st.data())
def test_boxes_are_the_range(shape, data):
    from skyrl_megatron.runtime.checkpoint.rank_state import boxes

    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    limit = data.draw(st.none() | st.integers(1, numel))
    made = list(boxes(shape, start, stop, limit))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    visited = []
    for box in made:
        assert limit is None or box.numel <= limit
        places = itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
        flat = [sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]
        assert flat[0] == box.start and flat == list(range(box.start, box.start + box.numel))
        visited += flat
    assert visited == list(range(start, stop))
    if limit is None:
        assert len(made) <= max(1, 2 * len(shape) - 1)


def test_example():
    from skyrl_megatron.runtime.checkpoint.rank_state import boxes

    made = [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 8)]
    assert made == [
        ((0, 2), (1, 1)),
        ((1, 0), (1, 3)),
        ((2, 0), (1, 2)),
    ]
