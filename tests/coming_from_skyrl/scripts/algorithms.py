"""An estimator and a policy loss by decorator, another estimator by the registry."""

import numpy as np
import torch

from skyrl_megatron.utils.ppo_utils import (
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    register_advantage_estimator,
    register_policy_loss,
)


@register_advantage_estimator("above_median")
def compute_above_median_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, **kwargs
):
    with torch.no_grad():
        totals = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
        advantages = (totals - totals.median()) * response_mask
        returns = advantages.clone()

        return advantages, returns


def nothing(**kwargs):
    raise NotImplementedError


AdvantageEstimatorRegistry.register("registered_directly", nothing)


@register_policy_loss("log_prob_times_advantage")
def compute_plain_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    return (-log_probs * advantages).mean(), 0.0


@register_policy_loss("without_engine_log_probs")
def compute_older_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return (-log_probs * advantages).mean(), 0.0


loss_of_the_registry = PolicyLossRegistry.get("log_prob_times_advantage")
