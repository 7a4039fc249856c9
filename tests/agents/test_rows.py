"""Every sampled token is a target exactly once, and loss and gradient do not show how a trajectory is split into rows.

The model is a tiny causal network in fp64, in place of Megatron, so that equal means equal to rounding; advantages,
objective, reduction and collation are those of a training step.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.graphs import VOCABULARY, generation, random_graph

GROUPS = st.lists(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 7), st.integers(-2, 2)), min_size=2, max_size=4),
    min_size=1,
    max_size=3,
)
"""Prompts → samples: (seed of the graph, calls, reward)."""


def targets(row):
    """Tokens and log-probs of a row that are trained on."""
    at = np.flatnonzero(row.loss_mask)
    return row.response_ids[at].tolist(), row.rollout_logprobs[at].tolist()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(["all", "calls"]))
def test_every_sampled_token_is_a_target_once_with_its_own_prefix(seed, calls, rule):
    from skyrl_megatron_agents.rows import rows_of

    graph = random_graph(seed, calls)
    rows = rows_of(graph, rule, 2.5)
    found = {}
    for row in rows:
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        assert row.loss_mask[-1] == 1 and len(ids) == len(row.prompt_ids) + len(row.loss_mask)
        for at in np.flatnonzero(row.loss_mask).tolist():
            place = len(row.prompt_ids) + at
            key = (tuple(ids[: place + 1]), float(row.rollout_logprobs[at]))
            found[key] = found.get(key, 0) + 1
    wanted = {}
    for call in graph.calls:
        for at, logprob in enumerate(call.generation.logprobs):
            key = (tuple(call.ids[: call.start + at + 1]), float(np.float32(logprob)))
            wanted[key] = wanted.get(key, 0) + 1
    assert found == wanted
    assert [sum(row.reward) for row in rows] == [0.0] * (len(rows) - 1) + [2.5] and rows[-1].reward[-1] == 2.5
    assert len(rows) == (len(graph.leaves()) if rule == "all" else calls)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.sampled_from(["grpo", "rloo", "maxrl"]), st.sampled_from(["token_mean", "prompt_mean"]))
def test_split_and_merged_rows_give_the_same_loss_and_gradient(groups, estimator, reduction):
    merged = step(groups, "all", estimator, reduction)
    split = step(groups, "calls", estimator, reduction)
    shuffled = step(groups, lambda graph: random.Random(3).sample(graph.calls, len(graph.calls)), estimator, reduction)
    for other in (split, shuffled):
        assert other[2] == merged[2]  # targets
        np.testing.assert_allclose(other[0], merged[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(other[1], merged[1], rtol=1e-10, atol=1e-13)


def test_a_token_that_two_rows_train_changes_the_gradient():
    """The comparison above notices it."""
    groups = [[(1, 4, 1), (2, 5, 0)]]
    whole = step(groups, "all", "grpo", "token_mean")
    twice = step(groups, "all", "grpo", "token_mean", twice=True)
    assert not np.allclose(whole[1], twice[1], rtol=1e-6)


def step(groups, rule, estimator, reduction, twice=False):
    """(loss, gradient, number of targets) of a step on the rows of all trajectories."""
    import torch

    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns
    from skyrl_megatron.algorithms.objective import PolicyObjective
    from skyrl_megatron.config import AlgorithmConfig
    from skyrl_megatron.data.batch import collate
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind, trajectory_of

    rows, uids, last = [], [], []
    for prompt, samples in enumerate(groups):
        for seed, calls, reward in samples:
            outcome = Outcome(OutcomeKind.SOLVED, float(reward))
            made = trajectory_of(random_graph(seed, calls), outcome, rule, end_token=0).rows
            made = [*made[:1], *made] if twice else made
            rows += made
            uids += [str(prompt)] * len(made)
            last += [False] * (len(made) - 1) + [True]
    batch = collate(
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        uids=uids,
        rewards=[row.reward for row in rows],
        loss_masks=[row.loss_mask for row in rows],
        rollout_logprobs=[row.rollout_logprobs for row in rows],
        is_last_step=last,
    ).padded()
    config = AlgorithmConfig(policy_loss_type="regular", loss_reduction=reduction, use_kl_loss=False)
    advantages, _ = compute_advantages_and_returns(
        token_level_rewards=batch.rewards.double(),
        response_mask=batch.response_mask,
        index=batch.uids,
        adv_estimator=estimator,
        config=config,
        is_last_step=batch.is_last_step,
        loss_mask=batch.loss_mask,
    )
    torch.manual_seed(0)
    weights = torch.randn(3, VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)
    seen = torch.nn.functional.one_hot(batch.sequences, VOCABULARY).double() * batch.attention_mask[..., None]
    state = torch.tanh(seen.cumsum(1) @ weights[0] * 0.3) + seen @ weights[1]
    logprobs = torch.log_softmax(state @ weights[2], -1)[:, :-1]
    picked = logprobs.gather(-1, batch.sequences[:, 1:, None])[..., 0][:, -batch.loss_mask.shape[1] :]
    objective = PolicyObjective(config)
    old = batch.rollout_logprobs.double()
    given = {"old_log_probs": old, "rollout_log_probs": old}
    totals = objective.totals(batch.loss_mask, uids=batch.uids, **given)
    loss, _ = objective(totals, picked, advantages, batch.loss_mask, uids=batch.uids, **given)
    loss.backward()
    return loss.item(), weights.grad.numpy(), int(batch.loss_mask.sum())


def test_rules():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_agents.rows import rows_of

    graph = random_graph(5, 6)
    (final,) = rows_of(graph, "final")
    assert [*final.prompt_ids.tolist(), *final.response_ids.tolist()] == graph.calls[-1].ids
    (own,) = rows_of(graph, lambda graph: [graph.calls[0]])
    assert targets(own)[0] == graph.calls[0].generation.token_ids
    assert len(rows_of(graph, lambda graph: [graph.calls[0]] * 3)) == 1
    with pytest.raises(DataError, match=r"unknown rule 'best'.*all, final, calls"):
        rows_of(graph, "best")
    with pytest.raises(DataError, match="another trajectory"):
        rows_of(graph, lambda _: random_graph(6, 2).calls)


def test_routes_of_a_row_are_those_of_its_whole_path():
    from skyrl_megatron_agents.graph import Graph, SampledCall
    from skyrl_megatron_agents.rows import rows_of

    rng, graph = random.Random(0), Graph()

    def experts(first, after):
        return np.arange(first, after, dtype=np.uint8)[:, None, None].repeat(2, 1)

    tokens = iter(range(1000))
    root = graph.restore(SampledCall(0, None, np.arange(3, dtype=np.int32), generation(rng), b"0"))
    root.generation = type(root.generation)([1, 2], [-0.1, -0.2], "stop", routed_experts=experts(0, 4))
    for number in (1, 2):  # both know the experts from the root's last token on
        rest = np.asarray([next(tokens), next(tokens)], np.int32)
        sampled = type(root.generation)([3, 4], [-0.1, -0.2], "stop", routed_experts=experts(4, 8))
        graph.restore(SampledCall(number, root, rest, sampled, b"%d" % number))
    first, second = rows_of(graph)
    for row in (first, second):
        np.testing.assert_array_equal(row.rollout_expert_indices, experts(0, 8))
    assert (len(first.prompt_ids), len(second.prompt_ids)) == (3, 7)


@pytest.mark.parametrize("kind", ["timed out", "context full", "infrastructure"])
def test_a_trajectory_that_is_no_sample_is_one_masked_row_outside_of_its_group(kind):
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind, trajectory_of

    made = trajectory_of(random_graph(1, 5), Outcome(OutcomeKind(kind), why="it broke"), end_token=2)
    (row,) = made.rows
    assert row.error == f"{kind}: it broke" and not row.loss_mask.any() and row.reward == [0.0]
    assert row.env_metrics[f"outcome_{kind.replace(' ', '_')}"] == 1.0


def test_outcomes():
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_agents.graph import Graph
    from skyrl_megatron_agents.rows import Outcome, OutcomeKind, trajectory_of

    with pytest.raises(DataError, match="never a sample"):
        Outcome(OutcomeKind.INFRASTRUCTURE, 0.0)
    with pytest.raises(DataError, match="has no reward"):
        Outcome(OutcomeKind.FAILED)
    for kind in (OutcomeKind.TIMED_OUT, OutcomeKind.CONTEXT_FULL):
        late = trajectory_of(random_graph(1, 5), Outcome(kind, -1.0), end_token=2)
        assert late.rows[-1].error is None and sum(map(sum, (row.reward for row in late.rows))) == -1.0
    (row,) = trajectory_of(Graph(), Outcome(OutcomeKind.SOLVED, 1.0), end_token=2).rows
    assert "no call to the model" in row.error and row.prompt_ids.tolist() == row.response_ids.tolist() == [2]
