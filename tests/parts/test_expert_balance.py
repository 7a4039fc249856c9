"""Micro-batches levelled by expert: the step of transformers with these experts, in every layout of experts."""

import pytest

from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

BALANCED = NO_DISTRIBUTED | {
    "trainer.share_prefixes": "never",  # trees are dealt otherwise: tests/training/test_shared_prefixes.py
    f"{MEGATRON}moe_enable_routing_replay": True,
    f"{MEGATRON}moe_balance_experts": True,
    "trainer.micro_train_batch_size_per_gpu": 2,
}
BY_TOKENS = {"trainer.max_tokens_per_microbatch": 48}
RECOMPUTED = {"trainer.gradient_checkpointing": True}
LAYOUTS = {
    "dp2·ep2": dict(world=2, ep=2),
    "tp2·ep2": dict(world=2, tp=2, ep=2),
    "dp4·ep4": dict(world=4, ep=4),
    "dp4·ep2": dict(world=4, ep=2),
    "pp2·dp2·ep2": dict(world=4, pp=2, ep=2),
    "pp2·vpp2·dp2·ep2": dict(world=4, pp=2, vpp=2, ep=2),
    "cp2·dp2·ep4": dict(world=4, cp=2, ep=4),
}


@pytest.fixture(scope="module")
def skewed(folder):
    """Sixteen rows, of which the first half needs experts 0 and 1 only, the second half 2 and 3."""
    import numpy as np

    batch = reference.make_batch(vocab_size=1003, rows=16)
    batch = reference.with_routes(batch, layers=4, experts=4, top_k=2)
    for row, routes in enumerate(batch.rollout_routes):
        if routes is not None:
            batch.rollout_routes[row] = np.sort(routes, -1) * 0 + np.array([0, 1], routes.dtype) + 2 * (row >= 8)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))


@pytest.fixture(scope="module")
def expected(folder, skewed, tmp_path_factory):
    return reference.policy_gradient_step(folder, skewed, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    "name, more",
    [
        ("dp2·ep2", {}),
        *(
            pytest.param(name, more, marks=pytest.mark.full_matrix)
            for name in LAYOUTS
            for more in ({}, BY_TOKENS, BY_TOKENS | RECOMPUTED)
            if (name, more) != ("dp2·ep2", {})
        ),
    ],
)
def test_the_step_is_the_same_and_the_load_is_level(ranks, folder, skewed, expected, name, more):
    layout = LAYOUTS[name]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, skewed, expected, layout, BALANCED | more)
    bodies.check(outcomes, expected)
    for outcome in outcomes:
        found = [outcome.metrics[f"moe_microbatch_imbalance{kind}"] for kind in ("_bound", "", "_plain")]
        assert found == sorted(found) and outcome.metrics["moe_balance_s"] > 0
        if not (name.startswith("dp4") and more):  # of four rows by tokens there is one plan
            assert found[1] < 1 + 0.6 * (found[2] - 1), "the plain plan is hardly worse"
        assert found == [outcomes[0].metrics[f"moe_microbatch_imbalance{kind}"] for kind in ("_bound", "", "_plain")]


def test_tokens_that_rows_share_load_experts_once():
    """Three answers to a prompt, whose tokens need rank 0, and a row alone."""
    from types import SimpleNamespace

    import numpy as np

    from skyrl_megatron.data.prefixes import SharedPrefixes
    from skyrl_megatron_parts.experts.balance import ExpertBalance

    lengths, prompt = np.array([48, 45, 48, 8]), list(range(40))
    answers = [[100 + row] * int(length - 40) for row, length in enumerate(lengths[:3])]
    tokens = np.array([token for answer in answers for token in prompt + answer] + [7] * 8, np.int32)
    routes = [np.array([[[0, 1]]] * 40 + [[[2, 3]]] * int(n - 40), np.int16) for n in lengths[:3]]
    batch = SimpleNamespace(lengths=lengths, rollout_routes=[*routes, np.full((8, 1, 2), 3, np.int16)])
    balance = object.__new__(ExpertBalance)
    balance.model = SimpleNamespace(experts=SimpleNamespace(ranks_of=lambda _: np.array([0, 0, 1, 1])))
    balance.groups, balance.layers = SimpleNamespace(parallel=SimpleNamespace(alignment=4)), [0]
    balance._flops, balance._unit = SimpleNamespace(forward=lambda n: n * (n + 1.0)), 2.0
    balance._routes, balance._scale = 0, 1.0
    prefixes = SharedPrefixes.of(tokens, lengths, lambda *pair: pair[2])
    parts = [np.array([0, 1, 2]), np.array([3])]
    apart, together = (balance._rows(batch, parts, [], known) for known in (None, prefixes))
    assert apart.tokens.tolist() == [48 * 3, 8] and together.tokens.tolist() == [40 + 8 * 3, 8]
    assert apart.loads.tolist() == [[[240, 42]], [[0, 16]]] and together.loads.tolist() == [[[80, 42]], [[0, 16]]]
    pairs = [n * (n + 1) // 2 for n in (48, 45, 48, 40)]
    assert apart.work.tolist() == [sum(pairs[:3]), 36]
    assert together.work.tolist() == [sum(pairs[:3]) - 2 * pairs[3], 36]


def wrong_routes(folder, batch, layout):
    """What the ranks say of experts that the model lacks, in rows of the last replica."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=BALANCED))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    if engine.dp_rank == engine.dp_size - 1:
        part.rollout_routes[0] = part.rollout_routes[0] + 200
    with pytest.raises(ValueError) as caught:
        engine.compute_logprobs(part)
    found = [str(caught.value)]
    part.rollout_routes = []
    engine.compute_logprobs(part)
    return [*found, engine.forward_backward(part)]


def test_wrong_routes_end_on_all_ranks_and_none_leave_the_plan(ranks, folder, skewed):
    for message, metrics in ranks(2, wrong_routes, folder, skewed, LAYOUTS["dp2·ep2"]):
        assert (
            message.startswith("part expert_balance: rank 1: uid ")
            and "does not have 2 different experts from 0 to 3" in message
        )
        assert not any(name.startswith("moe_microbatch_imbalance") for name in metrics)
