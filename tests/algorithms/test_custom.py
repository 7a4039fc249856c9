"""Losses and estimators that users write, for SkyRL or for us."""

import runpy
from pathlib import Path

import pytest

from tests.algorithms.vectors import algorithm_config, tensor

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"

LOG_PROBS = [[0.0, -0.5, -1.0], [-2.0, -0.25, -0.5]]
ADVANTAGES = [[9.0, 1.0, -1.0], [2.0, 2.0, 2.0]]
MASK = [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


def micro_batch():
    return tensor(LOG_PROBS).requires_grad_(), tensor(LOG_PROBS) - 0.1, tensor(ADVANTAGES), tensor(MASK)


def objective_of(function, loss_reduction="token_mean"):
    """The objective with a custom loss and nothing else in it."""
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.algorithms.objective import PolicyObjective

    PolicyLossRegistry.register("mine", function)
    try:
        return PolicyObjective(
            algorithm_config(policy_loss_type="mine", use_kl_loss=False, loss_reduction=loss_reduction)
        )
    finally:
        PolicyLossRegistry.unregister("mine")


def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    return (-log_probs * advantages).mean(), 0.0


def test_a_scalar_counts_as_the_mean_of_its_micro_batch():
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.algorithms.objective import _warned
    from skyrl_megatron.algorithms.reduction import StepTotals
    from skyrl_megatron.errors import SkyRLMegatronWarning

    _warned.clear()
    log_probs, old, advantages, mask = micro_batch()
    scalar = (-tensor(LOG_PROBS) * tensor(ADVANTAGES)).mean().item()
    totals = StepTotals(tokens=20, rows=8, prompt_tokens={"a": 20})
    shares = {"token_mean": 5 / 20, "seq_mean_token_sum_norm": 5 / 20, "sequence_mean": 2 / 8, "prompt_mean": 2 / 8}
    with pytest.warns(SkyRLMegatronWarning, match="'mine' returns a scalar") as warned:
        for reduction, share in shares.items():
            objective = objective_of(reinforce, reduction)
            objective.config.max_seq_len = 10
            loss, metrics = objective(totals, log_probs, advantages, mask, old_log_probs=old, uids=["a", "a"])
            assert loss.item() == pytest.approx(scalar * share)
            log_probs.grad = None
            loss.backward()
            assert log_probs.grad.flatten().tolist() == pytest.approx(
                (-tensor(ADVANTAGES) / 6 * share).flatten().tolist()
            )
            assert metric_values(metrics)["loss_metrics/clip_ratio"] == 0
    assert len(warned) == 1


def spelled_the_other_way(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return -advantages * (log_probs - rollout_logprobs), {"clip_ratio": 0.5, "ratio_max": 3.0}


def without_rollout(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -advantages * log_probs * loss_mask, None


def only_four(logp, old, adv, cfg):
    return -adv * logp, {"clip_ratio": tensor(0.25)}


def by_keyword_only(log_probs, old_log_probs, advantages, config, *, rollout_log_probs, loss_mask, extra=1):
    return -advantages * (log_probs - rollout_log_probs), (0.5)


def takes_anything(*args, **kwargs):
    log_probs, _, advantages, _ = args
    return -advantages * (log_probs - kwargs["rollout_log_probs"]) * kwargs["loss_mask"], {}


@pytest.mark.parametrize(
    "function", [spelled_the_other_way, without_rollout, only_four, by_keyword_only, takes_anything]
)
def test_a_loss_per_token_is_masked_and_averaged(function):
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.algorithms.reduction import step_totals

    log_probs, old, advantages, mask = micro_batch()
    offset = 0.0 if function in (without_rollout, only_four) else 0.3
    totals = step_totals(mask) + step_totals(mask)  # another micro-batch of the same size
    loss, metrics = objective_of(function)(
        totals, log_probs, advantages, mask, old_log_probs=old, rollout_log_probs=log_probs.detach() * 0 + offset
    )
    expected = (-tensor(ADVANTAGES) * (tensor(LOG_PROBS) - offset) * tensor(MASK)).sum().item() / 10
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert log_probs.grad[0, 0] == 0
    if function is spelled_the_other_way:
        values = metric_values(metrics)
        assert values["loss_metrics/clip_ratio"] == 0.5 and values["loss_metrics/ratio_max"] == 3.0


def test_wrapping_a_builtin_loss():
    from skyrl_megatron.algorithms.reduction import step_totals
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.utils.ppo_utils import PolicyLossRegistry, masked_token_mean

    def wrapper(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
        loss, metrics = PolicyLossRegistry.get("regular")(log_probs, old_log_probs, advantages, config, loss_mask)
        return 2 * masked_token_mean(loss, loss_mask), metrics

    from skyrl_megatron.algorithms.objective import _warned

    _warned.clear()
    log_probs, old, advantages, mask = micro_batch()
    totals = step_totals(mask)
    with pytest.warns(SkyRLMegatronWarning, match="returns a scalar"):
        loss, metrics = objective_of(wrapper)(totals, log_probs, advantages, mask, old_log_probs=old)
    ratio = 2.718281828459045**0.1
    assert loss.item() == pytest.approx(2 * -ratio * (1 - 1 + 2 + 2 + 2) / 5)
    assert metrics["loss_metrics/clip_ratio"].weight == 5, "its (sum, count) pairs pass through"


@pytest.mark.parametrize(
    "result,message",
    [
        (lambda x: x.sum(), "got Tensor"),
        (lambda x: (x, {}, 1), "got 3 values"),
        (lambda x: (1.5, {}), "the loss is float 1.5"),
        (lambda x: (x[:, :1], {}), r"the loss is torch.float64 \[2, 1\]"),
        (lambda x: (x.detach(), {}), "the loss has no gradient"),
        (lambda x: (x, {"clip_ratio": "high"}), "the metric 'clip_ratio' = str"),
    ],
)
def test_wrong_returns(result, message):
    from skyrl_megatron.algorithms.reduction import step_totals

    log_probs, old, advantages, mask = micro_batch()
    objective = objective_of(lambda log_probs, old, advantages, config: result(log_probs))
    with pytest.raises(ValueError, match=rf"the policy loss 'mine' .*{message}"):
        objective(step_totals(mask), log_probs, advantages, mask, old_log_probs=old)


@pytest.mark.parametrize(
    "function", [lambda a, b, c: None, lambda a, b, c, d, weights: None, lambda a, b, c, d, *, tau: None]
)
def test_wrong_parameters(function):
    from skyrl_megatron.algorithms.objective import accepted_keywords

    with pytest.raises(ValueError, match=r"has parameters \(a, b, c.* it must take \(log_probs, old_log_probs"):
        accepted_keywords("mine", function)


def test_the_example_of_a_policy_loss_trains():
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.algorithms.objective import PolicyObjective

    runpy.run_path(str(EXAMPLES / "custom_policy_loss.py"))
    try:
        config = algorithm_config(policy_loss_type="reinforce", use_kl_loss=False)
        log_probs, old, advantages, mask = micro_batch()
        objective = PolicyObjective(config)
        loss, _ = objective(objective.totals(mask), log_probs, advantages, mask, old_log_probs=old)
        loss.backward()
        assert log_probs.grad.tolist() == [[0, -0.2, 0.2], [-0.4, -0.4, -0.4]]
    finally:
        PolicyLossRegistry.unregister("reinforce")


def test_the_example_of_an_estimator_runs():
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, compute_advantages_and_returns

    runpy.run_path(str(EXAMPLES / "custom_advantage_estimator.py"))
    try:
        rewards = tensor([[0.0, 3.0], [0.0, 1.0]])
        mask = tensor([[0.0, 1.0], [1.0, 1.0]])
        arguments = {"adv_estimator": "batch_baseline", "config": algorithm_config()}
        advantages, returns = compute_advantages_and_returns(rewards, mask, ["a", "b"], **arguments)
        assert advantages.tolist() == [[0, 1], [-1, -1]] and returns.equal(advantages)
    finally:
        AdvantageEstimatorRegistry.unregister("batch_baseline")


def test_an_estimator_written_for_skyrl():
    """Group ids arrive as an array, options as keywords; ``**kwargs`` swallows the rest."""
    import numpy as np
    import torch

    from skyrl_megatron.utils.ppo_utils import (
        AdvantageEstimatorRegistry,
        compute_advantages_and_returns,
        register_advantage_estimator,
    )

    @register_advantage_estimator("simple_baseline")
    def simple_baseline(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **kwargs):
        assert isinstance(index, np.ndarray) and kwargs["gamma"] == 0.9 and kwargs["config"] is config
        with torch.no_grad():
            response_rewards = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
            advantages = (response_rewards - response_rewards.mean()) * response_mask
            return advantages, advantages.clone()

    try:
        config, mask = algorithm_config(), tensor([[1.0, 1.0], [0.0, 1.0]])
        arguments = {"adv_estimator": "simple_baseline", "config": config, "gamma": 0.9}
        advantages, _ = compute_advantages_and_returns(tensor([[1.0, 1.0], [5.0, 4.0]]), mask, ["a", "a"], **arguments)
        assert advantages.tolist() == [[-1, -1], [0, 1]]
    finally:
        AdvantageEstimatorRegistry.unregister("simple_baseline")
