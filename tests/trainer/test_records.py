"""Recorded groups come back as they were: values, types, and the bits of every float."""

import math
import struct
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from skyrl_megatron.data.codec import Codec
from skyrl_megatron.errors import DataError, JournalError


def same(left, right):
    """Equal in type, shape and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.shape(left) == np.shape(right) and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    return left == right


def round_trip(codec, value):
    return codec.decode(b"".join(bytes(part) for part in codec.encode(value)))


@dataclass
class Point:
    x: object
    y: object


DTYPES = st.sampled_from(["u1", "u2", "i4", "i8", "f4", "f8", "?", ">i2", "<U3"]).map(np.dtype)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=9)
    | hnp.arrays(DTYPES, SHAPES)
    | hnp.arrays(np.uint8, st.integers(60, 200), elements=st.integers(0, 1))
    | st.lists(hnp.arrays(np.int16, st.integers(0, 4)), max_size=4)
    | st.lists(hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.just(2))), min_size=2, max_size=3)
    | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True)])
    | st.lists(st.integers(-(2**64), 2**64), min_size=8, max_size=20)
    | st.lists(st.integers(0, 9), min_size=8, max_size=20)
    | st.lists(st.floats(), min_size=8, max_size=20)
    | st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.0, -0.0, 1.5]), min_size=8, max_size=40)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_value(value):
    assert same(round_trip(Codec(Point), value), value)


def test_surrogates_strided_arrays_and_writable_results():
    codec = Codec()
    value = {"a\ud800": np.arange(24).reshape(4, 6)[::2, ::3], "f": np.asfortranarray(np.ones((3, 2), np.float32))}
    back = round_trip(codec, value)
    assert same(back, {key: np.ascontiguousarray(array) for key, array in value.items()})
    back["f"][0, 0] = 2


@pytest.mark.parametrize(
    "value, said",
    [
        (
            {"env_metrics": [{"when": object()}]},
            r"env_metrics\[0\]\.when is a builtins.object, which cannot be recorded",
        ),
        ({"a": np.asarray([{}])}, "a is an array of object"),
        ({"a": {1, 2}}, "a is a builtins.set"),
    ],
)
def test_what_cannot_be_recorded_is_named(value, said):
    with pytest.raises(DataError, match=said):
        Codec().encode(value)


def test_a_record_of_another_version_is_refused():
    data = b"".join(bytes(part) for part in Codec(Point).encode(Point(1, 2)))
    with pytest.raises(JournalError, match="does not fit this version"):
        Codec().decode(data)
    with pytest.raises(JournalError, match="does not fit this version"):
        Codec(Point).decode(data.replace(b'"y"', b'"z"'))


def rows(draw, n, one_turn, routes, support, array):
    """Rows of a generator output with n tokens each."""
    from skyrl_megatron.types import TokenSupport

    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    as_tokens = (lambda x: x) if array else (lambda x: x.tolist())
    made = {
        "prompt_token_ids": as_tokens(rng.integers(0, 150_000, 7, np.int32)),
        "response_ids": as_tokens(rng.integers(0, 150_000, n, np.int32)),
        "rewards": float(rng.random()) if one_turn else [0.0] * (n - 1) + [float(rng.random())],
        "loss_masks": as_tokens(rng.integers(0, 2, n, np.uint8)),
        "rollout_logprobs": as_tokens(-rng.random(n, np.float32)),
        "rollout_expert_indices": rng.integers(0, 64, (n + 6, 3, 2)).astype(routes) if routes else None,
        "rollout_support": TokenSupport.of([list(range(i % 4)) for i in range(n)]) if support else None,
        "rollout_versions": [("3", 0, n // 2), ("4", n // 2, n)],
        "stop_reasons": draw(st.sampled_from(["stop", "length", "error"])),
        "env_metrics": {"steps": 2, "score": np.float32(0.25)},
        "errors": draw(st.sampled_from([None, "ValueError: Größe"])),
        "is_last_step": draw(st.booleans()),
    }
    return made


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_group(data):
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron.sources.records import CODEC, FinishedGroup

    facts = data.draw(
        st.tuples(st.booleans(), st.sampled_from([None, np.uint8, np.uint16]), st.booleans(), st.booleans())
    )
    made = [rows(data.draw, n, *facts) for n in data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))]
    output = {key: [row[key] for row in made] for key in made[0]}
    output["trajectory_ids"] = [TrajectoryID("uid", i) for i in range(len(made))]
    output["rollout_metrics"] = {"generate/avg_turns": float("nan")}
    group = FinishedGroup(12, "uid", 3, output, started=2)
    assert same(round_trip(CODEC, group), group)


def test_bytes_of_a_token():
    """Ids and log-probs take four bytes each, a mask a bit, routes L · K."""
    from skyrl_megatron.sources.records import CODEC, FinishedGroup

    n, rng = 10_000, np.random.default_rng(0)
    output = {
        "prompt_token_ids": [np.zeros(0, np.int32)],
        "response_ids": [rng.integers(0, 150_000, n, np.int32)],
        "rewards": [[0.0] * (n - 1) + [1.0]],
        "loss_masks": [np.ones(n, np.uint8)],
        "rollout_logprobs": [np.zeros(n, np.float32)],
        "rollout_expert_indices": [rng.integers(0, 64, (n, 4, 2), np.uint8)],
    }
    size = sum(len(part) for part in CODEC.encode(FinishedGroup(0, "0", 0, output)))
    assert size == pytest.approx(n * (4 + 4 + 1 / 8 + 8), abs=600)
