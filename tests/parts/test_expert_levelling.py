"""Micro-batches levelled by the load of EP ranks, as properties of random inputs and against brute force."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def replicas_of(seed, replicas, rows, layers, ranks, cap, topics=4):
    """Rows with the routes of few topics, planned by tokens."""
    from skyrl_megatron.data.splitting import pack_by_tokens, split_to_count
    from skyrl_megatron_parts.experts.levelling import ReplicaRows

    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(ranks, 0.5), size=(topics, layers))
    made = []
    for number in rows:
        tokens = rng.integers(1, cap // 2 + 1, number)
        loads = np.stack([rng.multinomial(2 * n, taste[rng.integers(topics)]) for n in tokens])
        made.append((pack_by_tokens(tokens, cap), tokens, tokens * 3 + tokens**2 // cap, loads))
    count = max(len(plan) for plan, *_ in made)
    assert len(made) == replicas
    return [ReplicaRows(split_to_count(plan, tokens, count), tokens, *rest) for plan, tokens, *rest in made]


def time_of(replicas, plans):
    """The time of a pass by its definition, one micro-batch and layer after the other."""
    total = 0
    for number in range(len(plans[0])):
        work, loads = [], 0
        for replica, plan in zip(replicas, plans, strict=True):
            work.append(sum(int(replica.work[row]) for row in plan[number]))
            loads = loads + sum((replica.loads[row] for row in plan[number]), np.zeros_like(replica.loads[0]))
        total += max(work) + sum(int(layer.max()) for layer in loads)
    return total


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    layers=st.integers(1, 3),
    ranks=st.integers(2, 4),
    fixed=st.sampled_from([0, 1, 3]),
)
def test_the_limits_of_the_plain_plan_hold_and_it_is_never_faster(seed, rows, layers, ranks, fixed):
    from skyrl_megatron_parts.experts.levelling import balance_experts

    replicas, most = replicas_of(seed, len(rows), rows, layers, ranks, 64), None
    if fixed:
        count = -(-max(rows) // fixed)
        for each in replicas:
            size = len(each.tokens)
            each.plan[:] = [np.arange(i * fixed, min((i + 1) * fixed, size)) for i in range(count)]
        most = fixed
    cap = max(int(each.tokens[own].sum()) for each in replicas for own in each.plan)
    plans, found = balance_experts(replicas, max_tokens=cap, max_rows=most)
    for replica, plan in zip(replicas, plans, strict=True):
        assert len(plan) == len(replica.plan)
        assert sorted(np.concatenate(plan).tolist()) == list(range(len(replica.tokens)))
        assert max(replica.tokens[own].sum() for own in plan) <= cap
        assert most is None or max(map(len, plan)) <= most
    assert time_of(replicas, plans) <= time_of(replicas, [each.plan for each in replicas])
    assert 1.0 <= found.bound <= found.balanced + 1e-12


def test_rows_of_one_rank_each_are_paired():
    """Two ranks, each the only one of half of the rows: the plain plan has them apart, the levelled one together."""
    from skyrl_megatron_parts.experts.levelling import ReplicaRows, balance_experts

    tokens = np.array([9, 9, 8, 8, 8, 8, 7, 7])
    loads = np.zeros((8, 1, 2), np.int64)
    loads[[0, 1, 4, 5], 0, 0] = tokens[[0, 1, 4, 5]]
    loads[[2, 3, 6, 7], 0, 1] = tokens[[2, 3, 6, 7]]
    plain = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5]), np.array([6, 7])]
    replica = ReplicaRows(plain, tokens, tokens, loads)
    (plan,), found = balance_experts([replica], max_tokens=18, max_rows=2)
    assert found.plain == 2.0 and found.balanced <= 1.1 and found.bound == pytest.approx(34 / 32)
    assert all({row % 4 < 2 for row in own.tolist()} == {True, False} for own in plan)


def test_no_grouping_is_below_the_bound_and_the_plan_is_close_to_the_best():
    """Against all ways to put eight rows into four pairs."""
    from skyrl_megatron_parts.experts.levelling import ReplicaRows, balance_experts

    rng, gaps = np.random.default_rng(0), []
    for _ in range(20):
        loads = rng.integers(0, 50, (8, 2, 3))
        tokens = np.full(8, 10)
        plain = [np.arange(2 * i, 2 * i + 2) for i in range(4)]
        replica = ReplicaRows(plain, tokens, tokens, loads)
        _, found = balance_experts([replica], max_tokens=20, max_rows=2)
        mean = loads.sum() / 3
        best = min(
            sum(loads[list(order[i : i + 2])].sum(0).max(-1).sum() for i in (0, 2, 4, 6))
            for order in permutations(range(8))
            if order[0] < order[1] and order[2] < order[3] and order[4] < order[5] and order[6] < order[7]
        )
        assert found.bound <= best / mean <= found.balanced <= found.plain
        gaps.append(found.balanced / (best / mean) - 1)
    assert np.mean(gaps) < 0.08


def test_every_rank_gets_the_same_plan_from_exact_arithmetic():
    """Sums in another order would break ties otherwise: layers and EP ranks are permuted, the plan stays."""
    from dataclasses import replace

    from skyrl_megatron_parts.experts.levelling import balance_experts

    replicas = replicas_of(3, 2, [200, 190], 6, 4, 100_000)
    order = np.random.default_rng(1).permutation(6)
    other = [replace(each, loads=each.loads[:, order][:, :, ::-1]) for each in replicas]
    cap = 100_000
    (one, _), (two, _) = (balance_experts(each, max_tokens=cap) for each in (replicas, other))
    for plan, same in zip(one, two, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(plan, same, strict=True))


def test_loads_count_every_route_on_the_rank_of_its_expert():
    from skyrl_megatron_parts.experts.levelling import rank_loads

    rng = np.random.default_rng(0)
    table = np.array([[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]])
    routes = [rng.permuted(np.tile(np.arange(4), (n, 3, 1)), axis=-1)[..., :2].astype(np.uint8) for n in (5, 0, 8)]
    lengths = np.array([5, 3, 16])
    loads = rank_loads([routes[0], None, routes[2]], lengths, [0, 2], table[[0, 2]])
    for row, scale in ((0, 1), (2, 2)):  # half of the tokens of row 2 have routes
        for index, layer in enumerate((0, 2)):
            experts = routes[row][:, layer].ravel()
            assert loads[row, index].tolist() == [scale * int((table[layer][experts] == r).sum()) for r in (0, 1)]
    known = loads[[0, 2]].sum(0)
    assert loads[1].tolist() == (3 * known // 21).tolist()
    assert not rank_loads([None] * 3, lengths, [0, 2], table[[0, 2]]).any()


def test_large_batches_are_sampled(monkeypatch):
    """Loads of sampled tokens differ from those of all by what sampling explains."""
    from skyrl_megatron_parts.experts import levelling as expert_balance

    rng = np.random.default_rng(0)
    routes = [rng.choice(8, (4000, 2, 1), p=np.arange(1, 9) / 36).astype(np.uint8) for _ in range(4)]
    lengths, table = np.full(4, 4000), np.tile(np.arange(8) // 2, (2, 1))
    exact = expert_balance.rank_loads(routes, lengths, [0, 1], table)
    monkeypatch.setattr(expert_balance, "ROUTES", 4000)
    sampled = expert_balance.rank_loads(routes, lengths, [0, 1], table)
    assert not np.array_equal(exact, sampled)
    assert np.abs(exact - sampled).max() < 5 * 4000 * np.sqrt(0.25 / 500)
    assert expert_balance.planned_layers(range(61), 64) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert expert_balance.planned_layers(range(48), 8) == list(range(48))
