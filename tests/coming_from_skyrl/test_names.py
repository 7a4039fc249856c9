"""Names, signatures and values that scripts written for SkyRL count on, beyond what the contracts list."""

import inspect

import pytest

from tests.structure.source import parameters

LOSS = "log_probs old_log_probs advantages config loss_mask=None rollout_log_probs=None"
ESTIMATORS = {
    "compute_grpo_outcome_advantage": "token_level_rewards response_mask index epsilon=1e-06 grpo_norm_by_std=True",
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lambd",
    "compute_rloo_outcome_advantage": "token_level_rewards response_mask index",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask gamma",
}
LOSSES = {
    "ppo_policy_loss": "regular",
    "gspo_policy_loss": "gspo",
    "sapo_policy_loss": "sapo",
    "cross_entropy_loss": "cross_entropy",
    "importance_sampling_loss": "importance_sampling",
    "compute_policy_loss_cispo": "cispo",
    "compute_policy_loss_clip_cov": "clip_cov",
    "compute_policy_loss_kl_cov": "kl_cov",
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_take_the_parameters(name):
    from skyrl_megatron.utils import ppo_utils

    *taken, rest = parameters(getattr(ppo_utils, name)).split()
    assert " ".join(taken) == ESTIMATORS[name] and rest.startswith("**")


@pytest.mark.parametrize(("name", "registered"), LOSSES.items())
def test_losses_are_those_of_the_registry(name, registered):
    import torch

    from skyrl_megatron.algorithms.losses import seed_random_picks
    from skyrl_megatron.config import AlgorithmConfig
    from skyrl_megatron.utils import ppo_utils

    function = getattr(ppo_utils, name)
    assert parameters(function) == LOSS
    torch.manual_seed(0)
    config = AlgorithmConfig(policy_loss_type=registered)
    log_probs, old, advantages = -torch.rand(3, 2, 5)
    mask = torch.tensor([[1.0, 1, 1, 0, 1], [0, 1, 1, 1, 1]])
    losses = []
    for each in (function, ppo_utils.PolicyLossRegistry.get(registered)):
        seed_random_picks(0)
        losses.append(each(log_probs, old, advantages, config, loss_mask=mask)[0])
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert losses[0].shape == mask.shape and bool((losses[0][mask == 0] == 0).all())


def test_ppo_follows_the_configured_type():
    """One function for both names, as scripts expect that set ``policy_loss_type``."""
    import torch

    from skyrl_megatron.config import AlgorithmConfig
    from skyrl_megatron.utils.ppo_utils import ppo_policy_loss

    far = torch.full((1, 2), 3.0)
    config = AlgorithmConfig(policy_loss_type="dual_clip", clip_ratio_c=2.5)
    dual, _ = ppo_policy_loss(far, torch.zeros(1, 2), -torch.ones(1, 2), config)
    regular, _ = ppo_policy_loss(far, torch.zeros(1, 2), -torch.ones(1, 2), AlgorithmConfig())
    assert dual.tolist() == [[2.5, 2.5]] and regular[0].tolist() == pytest.approx([20.0855] * 2, rel=1e-5)


def test_gae_takes_values_before_the_mask():
    import torch

    from skyrl_megatron.utils.ppo_utils import compute_advantages_and_returns, compute_gae_advantage_return

    torch.manual_seed(0)
    rewards, values, mask = torch.rand(2, 4), torch.rand(2, 4), torch.ones(2, 4)
    _, returns = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    _, expected = compute_advantages_and_returns(rewards, mask, [0, 1], "gae", None, values, gamma=0.9, lambd=0.8)
    torch.testing.assert_close(returns, expected, rtol=0, atol=0)


def test_modules_by_their_names_there():
    from skyrl_megatron import config, utils
    from skyrl_megatron.config.config import SkyRLTrainConfig, get_config_as_dict, make_config
    from skyrl_megatron.utils.utils import initialize_ray, validate_cfg

    assert SkyRLTrainConfig is config.SkyRLTrainConfig and make_config is config.make_config
    assert validate_cfg is utils.validate_cfg and initialize_ray is utils.initialize_ray
    assert inspect.isfunction(get_config_as_dict)
