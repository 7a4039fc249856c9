"""The plan of moves: balance, what it may not do, and when it does nothing."""

import numpy as np
import pytest

from skyrl_megatron_parts.experts.plan import (
    HORIZON,
    Freedom,
    MoveCosts,
    imbalance,
    plan_layer,
    plan_moves,
    rank_loads,
    shuffle_layer,
)

FREE = MoveCosts(row=1.0, move=0.0)


def zipf(experts, exponent, tokens=100_000, seed=0):
    shares = 1 / np.arange(1, experts + 1) ** exponent
    return (np.random.default_rng(seed).permutation(shares / shares.sum()) * tokens).round()


@pytest.mark.parametrize("exponent", [0.2, 0.4, 0.7, 1.2])
@pytest.mark.parametrize("experts, ranks", [(128, 8), (256, 32), (256, 64), (64, 2)])
def test_ranks_get_equally_many_tokens(experts, ranks, exponent):
    """Within 6 % of what no plan can be below: the mean, or the hottest expert with the coldest ones."""
    load, each = zipf(experts, exponent), experts // ranks
    plan = plan_layer(load, range(experts), ranks, Freedom.of(experts, ranks, None), FREE)
    least = max(load.sum() / ranks, load.max() + np.sort(load)[: each - 1].sum())
    assert rank_loads(load, plan.slots, ranks).max() <= 1.06 * least
    assert sorted(plan.slots) == list(range(experts))
    assert plan.after == imbalance(rank_loads(load, plan.slots, ranks)) < plan.before
    assert plan.moved == sum(slot != expert for slot, expert in enumerate(plan.slots))


def test_a_small_model_against_all_exchanges():
    """Two ranks of three experts: the best of all twenty ways to share them."""
    from itertools import combinations

    for seed in range(20):
        load = np.random.default_rng(seed).integers(0, 100, 6)
        best = min(
            max(sum(load[list(part)]), load.sum() - sum(load[list(part)])) for part in combinations(range(6), 3)
        )
        plan = plan_layer(load, range(6), 2, Freedom.of(6, 2, None), FREE)
        assert rank_loads(load, plan.slots, 2).max() <= best * 1.12


def test_moves_pay_back_or_are_not_made():
    load = zipf(64, 0.8)
    free = plan_layer(load, range(64), 8, Freedom.of(64, 8, None), FREE)
    saved = (free.before - free.after) * load.mean() * 8
    for price in (0.1, 1.0, 10.0):
        costs = MoveCosts(row=1.0, move=price * HORIZON * saved / free.incoming)
        plan = plan_layer(load, range(64), 8, Freedom.of(64, 8, None), costs)
        gain = (plan.before - plan.after) * load.mean() * 8 * HORIZON - plan.incoming * costs.move
        assert gain > 0 if plan.moved else gain == 0
        assert bool(plan.moved) == (price < 10)
    again = plan_layer(load, free.slots, 8, Freedom.of(64, 8, None), FREE)
    assert again.after == again.before == free.after, "what is balanced stays"


def test_no_tokens():
    plan = plan_layer([0.0] * 8, range(8), 4, Freedom.of(8, 4, None), FREE)
    assert (plan.moved, plan.before, plan.after) == (0, 1.0, 1.0)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ranks, groups", [(16, 4), (8, 8), (4, 8), (2, 8)])
def test_group_limited_routing(ranks, groups, shuffled):
    """A token that reaches few groups reaches few ranks: each group stays on as many ranks as at first."""
    load, freedom = zipf(64, 0.8), Freedom.of(64, ranks, groups)
    plan = (
        shuffle_layer(load, range(64), ranks, freedom, seed=(1, 2))
        if shuffled
        else plan_layer(load, range(64), ranks, freedom, FREE)
    )
    homes = {expert: slot // (64 // ranks) for slot, expert in enumerate(plan.slots)}
    for group in range(groups):
        held = {homes[expert] for expert in range(group * 64 // groups, (group + 1) * 64 // groups)}
        assert len(held) == max(ranks // groups, 1)
    assert plan.moved or (ranks, groups) == (8, 8), plan
    assert plan.after <= plan.before or shuffled


def test_groups_that_do_not_fit_the_ranks_stay():
    plan = plan_layer(zipf(48, 0.8), range(48), 6, Freedom.of(48, 6, 4), FREE)
    assert plan.moved == 0


def test_a_shuffle_depends_on_step_and_layer_only():
    loads, slots = {0: [1.0] * 8, 1: [1.0] * 8}, {0: range(8), 1: range(8)}
    freedom = Freedom.of(8, 4, None)
    first = plan_moves(loads, slots, 4, freedom, FREE, shuffle=1)
    assert first == plan_moves(loads, slots, 4, freedom, FREE, shuffle=1)
    assert first[0].slots != first[1].slots != plan_moves(loads, slots, 4, freedom, FREE, shuffle=2)[1].slots


def test_costs():
    """Of an expert of Qwen3-30B-A3B by hand: 3 · 2048 · 768 elements, 2 bytes of weights and 12 of state."""
    costs = MoveCosts.of(2048, 768, weight_bytes=2, edp=2, etp=1, gpu="H200", flops=1e15)
    elements = 3 * 2048 * 768
    assert costs.move == pytest.approx(elements * (2 + 6) / 50e9 / 0.65)
    assert costs.row == pytest.approx(6 * elements / 2 / 0.33e15)
    assert costs.tokens == pytest.approx(costs.move / costs.row / HORIZON)
