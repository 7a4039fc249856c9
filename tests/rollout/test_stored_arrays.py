"""Arrays in the object store: what is done with them without a fetch, and what they are when they are read."""

import copy
import pickle

import numpy as np
import pytest


@pytest.fixture
def both():
    """(a stored array of two pieces that are at hand, the same as a NumPy array)."""
    from skyrl_megatron.types import StoredArray

    first, second = (
        np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        np.arange(100, 140, dtype=np.uint8).reshape(10, 2, 2),
    )
    stored = StoredArray([(first, 1, 5), (second, 3, 4), (second, 8, 8), (first, 0, 2)], (2, 2), np.dtype(np.uint8))
    return stored, np.concatenate([first[1:5], second[3:4], first[:2]])


def test_it_is_the_array(both):
    stored, plain = both
    assert (stored.shape, stored.dtype, stored.nbytes, len(stored)) == (plain.shape, plain.dtype, plain.nbytes, 7)
    for read in (
        np.asarray(stored),
        pickle.loads(pickle.dumps(stored)),
        copy.copy(stored),
        np.array(stored, copy=True),
    ):
        np.testing.assert_array_equal(read, plain)
    np.testing.assert_array_equal((stored + 1) % 8, (plain + 1) % 8)
    np.testing.assert_array_equal(np.concatenate([stored, plain]), np.concatenate([plain, plain]))
    np.testing.assert_array_equal(stored[2, 1], plain[2, 1])
    np.testing.assert_array_equal(stored[::2], plain[::2])
    np.testing.assert_array_equal(stored.astype(int), plain)
    assert stored.max() == plain.max() and stored.tolist() == plain.tolist()


def test_slices_and_joined_arrays_stay_where_they_are(both):
    from skyrl_megatron.types import StoredArray, fetched, joined_arrays

    stored, plain = both
    for start in range(-9, 10):
        for stop in range(-9, 10):
            part = stored[start:stop]
            assert type(part) is StoredArray and part.shape == plain[start:stop].shape
            np.testing.assert_array_equal(part, plain[start:stop])
    joined = joined_arrays([stored[:3], plain[2:4], stored[5:]])
    assert type(joined) is StoredArray
    np.testing.assert_array_equal(joined, np.concatenate([plain[:3], plain[2:4], plain[5:]]))
    assert type(joined_arrays([plain, plain])) is np.ndarray
    given = [stored, None, plain, "else", stored[:0]]
    read = fetched(given)
    np.testing.assert_array_equal(read[0], plain)
    assert read[1:4] == [None, plain, "else"] and read[4].shape == (0, 2, 2)


def test_a_journal_has_its_numbers(both):
    from skyrl_megatron.data.codec import Codec
    from skyrl_megatron.inference.protocol import Generation

    stored, plain = both
    codec = Codec(Generation)
    data = codec.encode(Generation([1], [0.0], "stop", routed_experts=stored))
    back = codec.decode(b"".join(bytes(part) for part in data))
    assert type(back.routed_experts) is np.ndarray
    np.testing.assert_array_equal(back.routed_experts, plain)


def test_turns_are_joined_without_a_fetch(both):
    """Of a row, of a turn in two requests, and of its beginning."""
    from skyrl_megatron.inference.protocol import Generation
    from skyrl_megatron.rollout.continuation import continued, first_tokens
    from skyrl_megatron.rollout.conversation import Turn, sequence_of
    from skyrl_megatron.types import StoredArray

    class Unread(StoredArray):
        def __array__(self, dtype=None, copy=None):
            raise AssertionError("fetched")

    def stored(of):
        return Unread([(of, 0, len(of))], of.shape[1:], of.dtype)

    routes = np.arange(80, dtype=np.uint8).reshape(20, 2, 2)
    begun = Generation([5, 6, 7], [0.0] * 3, "abort", routed_experts=stored(routes[:6]))  # a prompt of 4
    rest = Generation([8, 9], [0.0] * 2, "stop", routed_experts=stored(routes[:8]))
    whole = continued(begun, rest, 4)
    np.testing.assert_array_equal(StoredArray.__array__(whole.routed_experts), routes[[*range(6), 6, 7]])
    assert first_tokens(whole, 3).routed_experts.shape == (6, 2, 2)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    row = sequence_of(ids, 4, [Turn(4, whole, 5, 0, 1.0)], "stop")
    assert isinstance(row.rollout_expert_indices, StoredArray) and row.rollout_expert_indices.shape == (8, 2, 2)
