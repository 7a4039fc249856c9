"""Estimators against recorded outputs of the reference, step-by-step recurrences, and each other."""

import numpy as np
import pytest

from tests.algorithms.vectors import algorithm_config, cases, tensor

# The reference casts the group's scores to float32 on the way to mean and std.
TOLERANCE = {"grpo": 5e-6}


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("estimator", ["grpo", "grpo:no_std", "rloo", "reinforce++", "gae", "maxrl"])
def test_equals_the_reference(estimator, number):
    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    case = cases("advantage")[number]
    name, _, option = estimator.partition(":")
    advantages, returns = compute_advantages_and_returns(
        tensor(case["token_level_rewards"]),
        tensor(case["response_mask"]),
        case["uid"],
        name,
        algorithm_config(),
        values=tensor(case["values"]),
        grpo_norm_by_std=option != "no_std",
        gamma=case["gamma"],
        lambd=case["lambd"],
    )
    limit = TOLERANCE.get(estimator, 1e-9)
    same = slice(None)
    if estimator == "maxrl":  # groups with a negative reward: test_maxrl_orders_as_the_rewards
        scores, uids = np.array(case["token_level_rewards"]).sum(axis=1), np.array(case["uid"])
        same = [row for row, uid in enumerate(uids) if (scores[uids == uid] >= 0).all() or (uids == uid).sum() == 1]
        assert same
    assert (advantages - tensor(case["expected"][estimator]["advantages"]))[same].abs().max() <= limit
    assert (returns - tensor(case["expected"][estimator]["returns"]))[same].abs().max() <= limit


@pytest.mark.parametrize(
    "scores",
    [[-1, -1, -1, 0], [-1, 1], [-1, 1.02], [-3, -2, -2.5], [0.425, -0.581, 0.156], [0, 0, 0, 1], [2, 0, 4], [0, 0]],
)
@pytest.mark.parametrize("unit", [1e-2, 1.0, 1e3])
def test_maxrl_orders_as_the_rewards(scores, unit):
    import torch

    from skyrl_megatron.algorithms.advantages import maxrl_scores

    rewards = unit * np.array(scores, dtype=np.float64)
    found = maxrl_scores(torch.from_numpy(rewards), ["a"] * len(scores)).numpy()
    np.testing.assert_allclose(found, (rewards - rewards.mean()) / (np.abs(rewards).mean() + 1e-6), rtol=1e-12)
    assert (np.argsort(found, kind="stable") == np.argsort(rewards, kind="stable")).all()
    assert np.abs(found).max() <= len(scores) + 1 and abs(found.mean()) < 1e-12
    if (rewards >= 0).all():
        np.testing.assert_allclose(found, (rewards - rewards.mean()) / (rewards.mean() + 1e-6), rtol=1e-12)


def random_case(rows, length, seed=0):
    """Rewards and values at every token, responses of random length; row 0 empty, row 1 full, row 2 with a gap."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, length
    mask = (torch.arange(length) >= length - lengths[:, None]).double()
    mask[2, length // 2] = 0
    rewards = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    return rewards, mask, values


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1025, 2100])
@pytest.mark.parametrize("factor", [0.0, 0.3, 0.95, 1.0])
def test_suffix_sum_equals_the_recurrence(length, factor):
    import torch

    from skyrl_megatron.algorithms.advantages import discounted_suffix_sum

    x = torch.randn(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    running, expected = torch.zeros(3, dtype=torch.float64), torch.empty_like(x)
    for t in reversed(range(length)):
        running = x[:, t] + factor * running
        expected[:, t] = running
    torch.testing.assert_close(discounted_suffix_sum(x, factor), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma,lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_the_recurrence(gamma, lambd):
    import torch

    from skyrl_megatron.algorithms.advantages import gae
    from skyrl_megatron.algorithms.masked import masked_whiten

    rewards, mask, values = random_case(7, 77)
    running, expected = torch.zeros(7, dtype=torch.float64), torch.empty_like(values)
    for t in reversed(range(77)):
        following = values[:, t + 1] if t < 76 else 0.0
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lambd * running
        expected[:, t] = running
    advantages, returns = gae(rewards, mask, values, gamma, lambd)
    torch.testing.assert_close(returns, expected + values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, masked_whiten(expected, mask), rtol=1e-11, atol=1e-11)
    valid = advantages[mask > 0]
    torch.testing.assert_close(valid.mean().item(), 0.0, rtol=0, atol=1e-12)
    torch.testing.assert_close(valid.var().item(), 1.0, rtol=1e-6, atol=0)


@pytest.mark.parametrize("critic_lambd, alpha", [(1.0, None), (None, 0.05), (0.8, 0.2)])
def test_gae_with_lambdas_of_its_own(critic_lambd, alpha):
    """Returns by the critic's λ, advantages by one that depends on the length of the response, each as a loop."""
    import torch

    from skyrl_megatron.algorithms.advantages import gae
    from skyrl_megatron.algorithms.masked import masked_whiten
    from skyrl_megatron.config import AlgorithmConfig, GAEConfig

    rewards, mask, values = random_case(7, 77)
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 3
    of_policy = (
        torch.full((7,), 0.9, dtype=torch.float64) if alpha is None else (1 - 1 / (alpha * lengths)).clamp(min=0)
    )
    of_critic = torch.full((7,), 0.9 if critic_lambd is None else critic_lambd, dtype=torch.float64)
    found = []
    for lambd in (of_policy.double(), of_critic):
        running, expected = torch.zeros(7, dtype=torch.float64), torch.empty_like(values)
        for t in reversed(range(77)):
            following = values[:, t + 1] if t < 76 else 0.0
            running = rewards[:, t] + 0.95 * following - values[:, t] + 0.95 * lambd * running
            expected[:, t] = running
        found.append(expected)
    config = AlgorithmConfig(gae=GAEConfig(critic_lambd, alpha))
    advantages, returns = gae(rewards, mask, values, 0.95, 0.9, config)
    torch.testing.assert_close(returns, found[1] + values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, masked_whiten(found[0], mask), rtol=1e-10, atol=1e-10)


def conversations(rows=7, length=77, seed=0):
    """Rewards, values, response and loss masks: every row has turns that are not trained, row 0 nothing else, row 1
    none of them; the last token of row 2 is not trained and has the reward."""
    generator = np.random.default_rng(seed)
    response = np.arange(length) >= length - generator.integers(length // 2, length, rows)[:, None]
    turns = np.repeat(generator.integers(0, 2, (rows, length // 7)), 7, axis=1)
    trained = response * turns[:, :length]
    trained[0], trained[1], trained[2, -3:] = 0, response[1], 0
    rewards, values = generator.normal(size=(2, rows, length)) * response
    rewards[2] = 0
    rewards[2, -1] = 1
    return rewards, values, response.astype(float), trained.astype(float)


def whitened(x, mask):
    kept = x[mask > 0]
    return (x - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)


def estimated(name, rewards, response, trained, config=None, **options):
    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    config = config or algorithm_config()
    options = {key: tensor(value) if key == "values" else value for key, value in options.items()}
    uids = [str(row) for row in range(len(rewards))]
    found = compute_advantages_and_returns(
        tensor(rewards), tensor(response), uids, name, config, loss_mask=tensor(trained), **options
    )
    return [part.numpy() for part in found]


@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("gamma,lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_passes_over_untrained_tokens(gamma, lambd, bootstrap, alpha):
    """The episode of the trained tokens alone, by the recurrence; cut rows are bootstrapped at their last token."""
    import torch

    rewards, values, response, trained = conversations()
    truncated = np.arange(7) % 2 == 1
    config = algorithm_config(gae__bootstrap_truncated=bootstrap, gae__length_adaptive_alpha=alpha)
    advantages, returns = estimated(
        "gae", rewards, response, trained, config, values=values, gamma=gamma, lambd=lambd,
        truncated=torch.from_numpy(truncated),
    )  # fmt: skip
    expected, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    for row in range(7):
        tokens = np.flatnonzero(trained[row])
        ends = [*tokens[1:], rewards.shape[1]][: len(tokens)]
        earned = [rewards[row, start:end].sum() for start, end in zip(tokens, ends, strict=True)]
        for out, factor in (
            (expected, lambd if alpha is None else max(0, 1 - 1 / (alpha * max(1, len(tokens))))),
            (targets, lambd),
        ):
            following = values[row, tokens[-1]] if len(tokens) and bootstrap and truncated[row] else 0.0
            running = 0.0
            for token, reward in zip(tokens[::-1], earned[::-1], strict=True):
                running = reward + gamma * following - values[row, token] + gamma * factor * running
                out[row, token], following = running, values[row, token]
    valid = trained > 0
    np.testing.assert_allclose(returns[valid], (targets + values)[valid], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(advantages[valid], whitened(expected, trained)[valid], rtol=1e-10, atol=1e-10)
    assert abs(advantages[valid].mean()) < 1e-12 and advantages[valid].std(ddof=1) == pytest.approx(1, rel=1e-6)


def test_gae_learns_nothing_from_the_values_of_untrained_tokens():
    """Values and rewards at tokens that are not trained change nothing; with ``skip_untrained_tokens=false``, SkyRL's
    way, they do, and the mean over the trained tokens is no longer 0."""
    rewards, values, response, trained = conversations()
    other = np.where(trained > 0, values, values + 3 * response)
    options, valid = {"gamma": 1.0, "lambd": 0.95}, trained > 0
    both = [estimated("gae", rewards, response, trained, values=each, **options) for each in (values, other)]
    for first, second in zip(*both, strict=True):
        np.testing.assert_array_equal(first[valid], second[valid])
    config = algorithm_config(skip_untrained_tokens=False)
    through, moved = (
        estimated("gae", rewards, response, trained, config, values=each, **options) for each in (values, other)
    )
    assert np.abs(through[1] - moved[1])[valid].max() > 0.5
    assert abs(moved[0][valid].mean()) > 0.1
    # As without a loss mask, where the recorded outputs of SkyRL hold (test_equals_the_reference).
    from skyrl_megatron.algorithms.advantages import gae

    plain = gae(tensor(rewards), tensor(response), tensor(values), 1.0, 0.95)
    for found, want in zip(through, plain, strict=True):
        np.testing.assert_array_equal(found, want.numpy())


@pytest.mark.parametrize("skip, expected", [(True, [0.955, 1.0]), (False, [0.91725, 1.0])])
def test_returns_around_a_tool_output_by_hand(skip, expected):
    """λ = 0.95, values 0.5, 0.2, 0.1, the second token a tool's. Passed over: 0.1 - 0.5 + 0.95·0.9 + 0.5."""
    row = [[0.0, 0.0, 1.0]], [[1.0, 1.0, 1.0]], [[1.0, 0.0, 1.0]]
    config = algorithm_config(skip_untrained_tokens=skip)
    _, returns = estimated("gae", *map(np.array, row), config, values=[[0.5, 0.2, 0.1]], lambd=0.95)
    np.testing.assert_allclose(returns[0, [0, 2]], expected, rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_reinforce_plus_plus_passes_over_untrained_tokens(gamma):
    rewards, _, response, trained = conversations()
    advantages, returns = estimated("reinforce++", rewards, response, trained, gamma=gamma)
    expected = np.zeros_like(rewards)
    for row in range(7):
        running, tokens = 0.0, np.flatnonzero(trained[row])
        ends = [*tokens[1:], rewards.shape[1]][: len(tokens)]
        for token, end in zip(tokens[::-1], ends[::-1], strict=True):
            running = rewards[row, token:end].sum() + gamma * running
            expected[row, token] = running
    np.testing.assert_allclose(returns, expected * trained, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(advantages, whitened(expected, trained) * trained, rtol=1e-10, atol=1e-10)
    config = algorithm_config(skip_untrained_tokens=False)
    stopped, _ = estimated("reinforce++", rewards, response, trained, config, gamma=gamma)
    assert np.abs(stopped - advantages)[trained > 0].max() > 0.01


@pytest.mark.parametrize("name", ["gae", "reinforce++"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_hardly_anything_to_train_on(name, tokens):
    """A batch whose rows are all masked, as by a filter, has advantages of 0."""
    rewards, values, response, trained = conversations()
    trained[:] = 0
    trained[3, -1] = tokens
    advantages, returns = estimated(name, rewards, response, trained, values=values)
    assert not advantages.any() and np.isfinite(returns).all()


def test_estimators_without_such_parameters_get_no_loss_mask():
    import torch

    from skyrl_megatron.algorithms.advantages import AdvantageEstimatorRegistry

    def strict(token_level_rewards, response_mask, index, values, grpo_norm_by_std, gamma, lambd, config):
        return token_level_rewards, token_level_rewards

    def asks(token_level_rewards, response_mask, index, loss_mask=None, truncated=None, **_):
        assert loss_mask.shape == response_mask.shape and truncated.tolist() == [True] + [False] * 6
        return token_level_rewards * loss_mask, token_level_rewards

    rewards, _, response, trained = conversations()
    for function in (strict, asks):
        AdvantageEstimatorRegistry.register("own", function)
        try:
            estimated("own", rewards, response, trained, truncated=torch.arange(7) == 0)
        finally:
            AdvantageEstimatorRegistry.unregister("own")


@pytest.mark.parametrize("lambd", [-0.1, 1.1])
def test_a_lambda_outside_0_to_1_is_named(lambd):
    from skyrl_megatron.algorithms.advantages import gae

    rewards, mask, values = random_case(3, 5)
    with pytest.raises(ValueError, match=rf"trainer.algorithm.lambd={lambd}: must be between 0 and 1"):
        gae(rewards, mask, values, 1.0, lambd)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_reinforce_plus_plus_stops_at_gaps(gamma):
    import torch

    from skyrl_megatron.algorithms.advantages import reinforce_plus_plus

    rewards, mask, _ = random_case(7, 77)
    running, expected = torch.zeros(7, dtype=torch.float64), torch.empty_like(rewards)
    for t in reversed(range(77)):
        running = rewards[:, t] + gamma * running
        expected[:, t] = running
        running = running * mask[:, t]
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma)
    torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)
    assert (advantages[mask == 0] == 0).all()


def test_group_estimators_by_hand():
    import torch

    from skyrl_megatron.algorithms.advantages import grpo_scores, maxrl_scores, rloo_scores

    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0], dtype=torch.float64)
    index = np.array(["a", "b", "a", "c", "a"])  # groups (1, 3, 2), (5), (7)
    assert grpo_scores(scores, index, norm_by_std=False).tolist() == [-1, 5, 1, 7, 0]
    normed = grpo_scores(scores, index)
    torch.testing.assert_close(normed, torch.tensor([-1, 5, 1, 7, 0], dtype=torch.float64) / (1 + 1e-6))
    assert rloo_scores(scores, index).tolist() == [-1.5, 0, 1.5, 0, 0]
    torch.testing.assert_close(
        maxrl_scores(scores, index), torch.tensor([-0.5, 5, 0.5, 7, 0], dtype=torch.float64), rtol=1e-6, atol=0
    )
    equal = torch.full((4,), 0.1)
    assert grpo_scores(equal, ["a"] * 4).abs().max() < 1e-6, "equal rewards teach nothing"
    as_numbers = grpo_scores(scores, torch.tensor([7, 9, 7, 1, 7]))
    assert torch.equal(as_numbers, normed), "any hashable uid will do"


def test_outcome_estimators_write_one_tensor():
    from skyrl_megatron.algorithms.advantages import AdvantageEstimatorRegistry

    rewards, mask, _ = random_case(6, 9)
    for name in ("grpo", "rloo", "maxrl"):
        advantages, returns = AdvantageEstimatorRegistry.get(name)(rewards, mask, ["a", "a", "b", "b", "b", "c"])
        assert advantages is returns and advantages.dtype == rewards.dtype


@pytest.mark.parametrize("padding", [0, 3, 9])
def test_batch_normalisation_ignores_padding(padding):
    import torch

    from skyrl_megatron.algorithms.advantages import normalize_advantages

    advantages = torch.tensor([[0.0, 0.0, 1.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    padded = torch.nn.functional.pad(advantages, (padding, 0), value=float("nan"))
    normal = normalize_advantages(padded, torch.nn.functional.pad(mask, (padding, 0)))
    # Four tokens, values 1 2 2 2: mean 7/4, biased variance 3/16.
    low, high = -(3**0.5), 1 / 3**0.5
    expected = torch.tensor([[0, 0, low], [high, high, high]], dtype=torch.float64)
    torch.testing.assert_close(normal[:, padding:], expected, rtol=1e-12, atol=1e-12)
    assert (normal[:, :padding] == 0).all()


def test_the_rows_of_a_trajectory_share_the_advantage_of_its_summed_rewards():
    import torch

    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    # Trajectories of 2, 1 and 3 steps with rewards of 4, 3 and 6; the first two answer the same prompt.
    last = torch.tensor([False, True, True, False, False, True])
    rewards = torch.zeros(6, 4, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([3.0, 1.0, 3.0, 0.5, 0.5, 5.0])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).double()
    config, uids = algorithm_config(), ["p", "p", "p", "q", "q", "q"]
    arguments = {"is_last_step": last, "grpo_norm_by_std": False}
    advantages, returns = compute_advantages_and_returns(rewards, mask, uids, "grpo", config, **arguments)
    expected = torch.tensor([0.5, 0.5, -0.5, 6.0, 6.0, 6.0], dtype=torch.float64)[:, None] * mask
    assert torch.equal(advantages, expected) and torch.equal(returns, expected)
    with pytest.raises(ValueError, match=r"estimator gae does not work with .*step_wise_trajectories"):
        compute_advantages_and_returns(rewards, mask, uids, "gae", config, values=rewards, is_last_step=last)
    with pytest.raises(ValueError, match=r"is_last_step must be \[B\] = \[6\]"):
        compute_advantages_and_returns(rewards, mask, uids, "grpo", config, is_last_step=~last)


def test_zero_variance_filter():
    import torch

    from skyrl_megatron.algorithms.advantages import rows_with_variance

    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 3.0, 2.0, 2.0 + 1e-7, 5.0])
    uids = ["equal", "equal", "varied", "varied", "one", "near", "near", "one more"]
    assert rows_with_variance(scores, uids).tolist() == [False, False, True, True, True, False, False, True]
    mask = torch.ones(8, 2)
    mask[2] = 0  # the response that made the difference is not trained on: one is left, which decides nothing
    assert rows_with_variance(scores, uids, mask).tolist() == [False, False, True, True, True, False, False, True]
    three = torch.tensor([0.0, 1.0, 1.0])
    assert rows_with_variance(three, ["a"] * 3).all()
    assert not rows_with_variance(three, ["a"] * 3, torch.tensor([[0.0], [1.0], [1.0]])).any()


def test_samples_that_are_not_finite():
    import torch

    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns
    from skyrl_megatron.algorithms.masked import finite_rows

    rewards = torch.zeros(5, 3)
    rewards[:, -1] = torch.tensor([1.0, 2.0, float("nan"), 4.0, float("inf")])
    mask, uids = torch.ones(5, 3), ["a", "a", "a", "b", "b"]
    message = r"token_level_rewards of row 2 \(uid 'a'\) is nan at token 2; 2 of 5 rows are not finite"
    with pytest.raises(ValueError, match=message):
        compute_advantages_and_returns(rewards, mask, uids, "rloo", algorithm_config())
    config = algorithm_config(nonfinite="skip")
    advantages, returns = compute_advantages_and_returns(rewards, mask, uids, "rloo", config)
    assert advantages[:, 0].tolist() == [-1, 1, 0, 0, 0], "the others are compared among themselves"
    assert returns.shape == rewards.shape
    assert finite_rows("rewards", rewards, nonfinite="skip").tolist() == [True, True, False, True, False]
    masked = mask.clone()
    masked[2, 2] = masked[4, 2] = 0
    assert finite_rows("log_probs", rewards, masked).all(), "what is masked may hold anything"
    huge = torch.full((2, 4), 3e38)
    assert finite_rows("log_probs", huge).all(), "a sum that overflows is no proof"


def test_log_probs_that_are_not_finite():
    import torch

    from skyrl_megatron.algorithms.masked import finite_samples
    from skyrl_megatron.types import PaddedBatch

    mask = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    old, rollout = torch.zeros(3, 2), torch.zeros(3, 2)
    old[0, 0] = float("nan")  # not trained on: nobody looks
    rollout[1, 1] = float("-inf")
    shape = {"sequences": torch.zeros(3, 4, dtype=torch.int64), "attention_mask": torch.ones(3, 4, dtype=torch.bool)}
    batch = PaddedBatch(**shape, response_mask=torch.ones(3, 2), loss_mask=mask, uids=["a", "b", "c"]).flat()
    assert batch.loss_mask.tolist() == [False, *[True] * 5]
    assert finite_samples(batch).all()
    batch.old_logprobs, batch.rollout_logprobs = old.flatten(), rollout.flatten()
    with pytest.raises(ValueError, match=r"rollout_logprobs of row 1 \(uid 'b'\) is -inf at token 1; 1 of 3 rows"):
        finite_samples(batch)
    assert finite_samples(batch, "skip").tolist() == [True, False, True]
    batch.rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, float("nan"), 0.0])
    assert finite_samples(batch, "skip").tolist() == [True, False, False]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"response_mask": (4, 3)}, r"response_mask has shape \(4, 3\), token_level_rewards has \(4, 2\)"),
        ({"response_mask": 2.0}, "response_mask must hold 0 and 1 only, found 2 in row 0, token 0"),
        ({"token_level_rewards": "int64"}, "token_level_rewards has dtype torch.int64"),
        ({"index": ["a", "b"]}, "index names 2 sequences, token_level_rewards has 4 rows"),
        (
            {"adv_estimator": "grpoo"},
            r"'grpoo' is not registered. Registered: distillation, gae, gdpo, grpo, maxrl, rae, rein.*, rloo",
        ),
        ({"adv_estimator": "gae"}, "the estimator gae needs values"),
    ],
)
def test_bad_input(change, message):
    import torch

    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    arguments = {
        "token_level_rewards": torch.randn(4, 2),
        "response_mask": torch.ones(4, 2),
        "index": ["a", "a", "b", "b"],
        "adv_estimator": "grpo",
        "config": algorithm_config(),
    }
    for key, value in change.items():
        match value:
            case tuple():
                value = torch.ones(value)
            case float():
                value = torch.full((4, 2), value)
            case "int64":
                value = torch.ones(4, 2, dtype=torch.int64)
        arguments[key] = value
    with pytest.raises(ValueError, match=message):
        compute_advantages_and_returns(**arguments)


@pytest.mark.parametrize(
    "result,message",
    [
        (lambda rewards: rewards, "got Tensor"),
        (lambda rewards: (rewards,), "got 1 values"),
        (lambda rewards: (rewards, rewards[:, :1]), r"returns is torch.float32 \[4, 1\]"),
        (lambda rewards: (None, rewards), "advantages is NoneType"),
    ],
)
def test_wrong_return_of_a_custom_estimator(result, message):
    import torch

    from skyrl_megatron.algorithms.advantages import AdvantageEstimatorRegistry, compute_advantages_and_returns

    AdvantageEstimatorRegistry.register("wrong", lambda token_level_rewards, **_: result(token_level_rewards))
    try:
        with pytest.raises(ValueError, match=rf"'wrong' must return .* both floating \[4, 2\]; .*{message}"):
            compute_advantages_and_returns(torch.randn(4, 2), torch.ones(4, 2), [0] * 4, "wrong", algorithm_config())
    finally:
        AdvantageEstimatorRegistry.unregister("wrong")
