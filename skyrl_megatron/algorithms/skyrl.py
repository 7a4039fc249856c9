"""The built-in functions under their SkyRL names and with their SkyRL parameters, for scripts written for SkyRL.

One thing differs from SkyRL: a policy loss returns the loss of each token [B, T] instead of a scalar. Use
:func:`~skyrl_megatron.algorithms.masked.masked_token_mean` to get a scalar.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.advantages import gae, reinforce_plus_plus
from skyrl_megatron.algorithms.advantages import grpo as compute_grpo_outcome_advantage
from skyrl_megatron.algorithms.advantages import rloo as compute_rloo_outcome_advantage
from skyrl_megatron.algorithms.losses import cispo as compute_policy_loss_cispo
from skyrl_megatron.algorithms.losses import clip_cov as compute_policy_loss_clip_cov
from skyrl_megatron.algorithms.losses import cross_entropy as cross_entropy_loss
from skyrl_megatron.algorithms.losses import dual_clip, regular
from skyrl_megatron.algorithms.losses import gspo as gspo_policy_loss
from skyrl_megatron.algorithms.losses import importance_sampling as importance_sampling_loss
from skyrl_megatron.algorithms.losses import kl_cov as compute_policy_loss_kl_cov
from skyrl_megatron.algorithms.losses import sapo as sapo_policy_loss
from skyrl_megatron.algorithms.metrics import ReducibleMetrics
from skyrl_megatron.config.schema.algorithm import PolicyLossType

__all__ = [
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "cross_entropy_loss",
    "gspo_policy_loss",
    "importance_sampling_loss",
    "ppo_policy_loss",
    "sapo_policy_loss",
]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lambd: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns [B, T] of :func:`gae`. Here ``values`` precede the mask."""
    return gae(token_level_rewards, response_mask, values, gamma, lambd, **kwargs)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns [B, T] of :func:`reinforce_plus_plus`."""
    return reinforce_plus_plus(token_level_rewards, response_mask, gamma, **kwargs)


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
) -> tuple[Tensor, ReducibleMetrics]:
    """Return the loss of each token [B, T]: ``dual_clip`` if ``config.policy_loss_type`` is ``dual_clip``, else
    ``regular``."""
    loss = dual_clip if config.policy_loss_type == PolicyLossType.DUAL_CLIP else regular
    return loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)
