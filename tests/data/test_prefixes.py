"""What rows share, against comparing all of them, on random tries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_megatron.data.prefixes import PrefixTree, SharedPrefixes, prefix_order


def made_rows(seed, count, longest):
    """Rows that continue a part of another one, are empty, copies, or begin anew; of few different tokens."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        source = rows[rng.integers(len(rows))] if rows and rng.random() < 0.7 else np.zeros(0, np.int32)
        kept = source[: rng.integers(len(source) + 1)] if rng.random() < 0.8 else source
        added = rng.integers(0, 3, rng.integers(longest + 1) if rng.random() < 0.8 else 0)
        rows.append(np.concatenate([kept, added]).astype(np.int32))
    return rows


def flat(rows):
    return np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.int32), np.array([len(row) for row in rows], int)


def same(one, other):
    """Tokens that two rows begin with."""
    shorter = min(len(one), len(other))
    unlike = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(unlike[0]) if len(unlike) else shorter


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 14), st.sampled_from([3, 70, 400]))
def test_the_order_and_the_tree(seed, count, longest):
    rows = made_rows(seed, count, longest)
    tokens, lengths = flat(rows)
    order, shared = prefix_order(tokens, lengths)
    assert sorted(order) == list(range(count)) and shared[0] == 0
    for place in range(1, count):
        assert shared[place] == same(rows[order[place - 1]], rows[order[place]])
    tree = PrefixTree.of(lengths[order], shared)
    # every token is there once: as many as there are different beginnings
    beginnings = {row[:end].tobytes() for row in rows for end in range(1, len(row) + 1)}
    assert tree.lengths.sum() == len(beginnings) and (tree.lengths > 0).all()
    assert (tree.parents < np.arange(len(tree))).all()
    users = np.zeros(len(tree), int)
    for place, row in enumerate(order):
        path = tree.path(int(tree.last[place]))
        users[path] += 1
        pieces = [rows[order[tree.rows[s]]][tree.begins[s] : tree.begins[s] + tree.lengths[s]] for s in path]
        assert np.concatenate([*pieces, np.zeros(0, np.int32)]).tolist() == rows[row].tolist()
    assert users.tolist() == tree.users.tolist()
    for segment in range(1, len(tree)):  # those that follow a segment come right after it
        assert tree.parents[segment] in (-1, *tree.path(segment - 1))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 14), st.sampled_from([1, 4]), st.sampled_from([0, 130, 900]))
def test_parts_have_every_row_once_and_keep_to_the_budget(seed, count, alignment, budget):
    rows = made_rows(seed, count, 100)
    tokens, lengths = flat(rows)
    prefixes = SharedPrefixes.of(tokens, lengths, lambda row, other, equal: equal)
    parts = prefixes.parts(lengths, alignment, budget, 3)
    assert sorted(np.concatenate(parts)) == list(range(count))
    for part in parts:
        chosen, shared = prefixes.among(part)
        for place in range(1, len(chosen)):
            least = same(rows[chosen[place - 1]], rows[chosen[place]])
            assert shared[place] <= least and (shared[place] == least or shared[place] == 0)
        computed = prefixes.tokens(part, lengths, alignment)
        assert computed >= len({rows[row][:end].tobytes() for row in part for end in range(1, len(rows[row]) + 1)})
        assert len(part) <= 3 if not budget else len(part) == 1 or computed <= budget


def test_equal_data_limits_what_is_shared():
    """Rows whose routes differ after 40 tokens share 40; those that differ before the shortest shared prefix, none."""
    row = np.arange(100, dtype=np.int32)
    tokens, lengths = np.concatenate([row, row, row]), np.full(3, 100)
    prefixes = SharedPrefixes.of(tokens, lengths, lambda one, other, equal: {1: 40, 2: 31}[max(one, other)])
    assert prefixes.shared.tolist() == [0, 40, 0]


def test_a_tree_of_rows_that_share_nothing_is_flat():
    tree = PrefixTree.separate([3, 0, 2])
    assert tree.is_flat and tree.last.tolist() == [0, 1, 2] and tree.users.tolist() == [1, 1, 1]
    assert not PrefixTree.of(np.array([3, 3]), np.array([0, 3])).is_flat, "a copy has no segment of its own"


@pytest.mark.parametrize("rows", [[], [[]], [[1, 2]], [[], []], [[5] * 70, [5] * 70]])
def test_few_rows(rows):
    tokens, lengths = flat([np.array(row, np.int32) for row in rows])
    order, shared = prefix_order(tokens, lengths)
    assert len(order) == len(shared) == len(rows) and shared[:1].tolist() == [0] * min(len(rows), 1)
    assert PrefixTree.of(lengths[order], shared).lengths.sum() == len(tokens) // max(len(rows), 1) if rows else True


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([1, 2, 4]))
def test_families_stay_together_while_replicas_get_equal_work(seed, count, replicas):
    rows = made_rows(seed, count, 100)
    tokens, lengths = flat(rows)
    prefixes = SharedPrefixes.of(tokens, lengths, lambda row, other, equal: equal)
    some = np.flatnonzero(np.random.default_rng(seed).random(count) < 0.8)
    groups, costs = prefixes.families(some, lengths, lambda n: n * 1.0, replicas)
    assert sorted(np.concatenate([*groups, np.zeros(0, int)])) == some.tolist()
    for group, cost in zip(groups, costs, strict=True):
        assert cost == prefixes.tokens(group, lengths, 1)
        assert len(group) == 1 or cost <= 1.1 * costs.sum() / replicas
    if replicas == 1:
        for group in groups:
            for other in groups:
                shared = max(same(rows[one], rows[two]) for one in group for two in other)
                assert other is group or shared < 32
