"""Packing under a token budget and balancing over ranks, as properties of random inputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    min_bins=st.integers(1, 9),
    multiple_of=st.integers(1, 4),
)
def test_every_sequence_once_and_no_bin_over_the_budget(lengths, min_bins, multiple_of):
    from skyrl_megatron.data.splitting import pack_by_tokens, plan_micro_batches

    lengths = np.array(lengths)
    bins = plan_micro_batches(
        lengths,
        alignment=1,
        max_tokens=100,
        rows=1,
        multiple_of=multiple_of,
        dp_maximum=lambda mine: [max(mine[0], min_bins), *mine[1:]],  # another replica needs at least min_bins
    )
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    assert max(lengths[rows].sum() for rows in bins) <= 100
    assert len(bins) >= min_bins and len(bins) % multiple_of == 0
    full = pack_by_tokens(lengths, 100)
    assert len(full) <= 11 / 9 * -(-lengths.sum() // 100) + 1 + (lengths > 50).sum()


def test_lognormal_lengths_reach_the_lower_bound():
    from skyrl_megatron.data.splitting import pack_by_tokens

    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(8.3, 0.9, 4096)).astype(int) + 1, 20_000)
    bins = pack_by_tokens(lengths, 32_768)
    assert len(bins) <= 1.002 * -(-lengths.sum() // 32_768)


def test_a_sequence_over_the_budget_is_named():
    from skyrl_megatron.data.splitting import pack_by_tokens

    with pytest.raises(ValueError, match="sequence 1 has 101 tokens, the budget of a micro-batch is 100"):
        pack_by_tokens(np.array([5, 101]), 100)


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.floats(0, 1e6), min_size=6, max_size=90), k=st.integers(1, 6), equal=st.booleans())
def test_balance_deals_out_everything(costs, k, equal):
    from skyrl_megatron.data.splitting import balance

    groups = balance(np.array(costs), k, equal_counts=equal)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(costs)))
    if equal:
        assert {len(group) for group in groups} <= {len(costs) // k, -(-len(costs) // k)}
    else:
        sums = [np.array(costs)[group].sum() for group in groups]
        assert max(sums) <= sum(costs) / k + max(costs) * (1 + 1e-9)


def test_balance_of_many_sequences_is_close_to_perfect():
    from skyrl_megatron.data.splitting import balance

    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(8.3, 0.9, 8192)), 20_000)
    costs = 24_576 * lengths + lengths**2
    sums = np.array([costs[group].sum() for group in balance(costs, 128, equal_counts=True)])
    assert sums.max() / sums.mean() - 1 < 5e-4
