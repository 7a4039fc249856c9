"""Policy losses: ``fn(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None)``.

All tensors are [B, T], log-probs in nats, advantages as the estimator gave them (not divided by anything). A built-in
loss returns the loss of each token [B, T], 0 where masked, and a dict of metrics; ``algorithms/reduction.py``
averages. A custom loss may return that too, or a scalar (``losses/custom.py``).

    name                                   file
    regular, dual_clip                     ppo.py
    gspo, cispo, sapo, dppo                gspo.py, cispo.py, sapo.py, dppo.py
    importance_sampling, rollout_is        importance_sampling.py
    clip_cov, kl_cov                       covariance.py
    cross_entropy                          cross_entropy.py
    ppo_critic_loss (the critic's)         critic.py

``builtin.py`` is what the formulas share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl_megatron.algorithms.losses.cispo import cispo
from skyrl_megatron.algorithms.losses.covariance import clip_cov, kl_cov, seed_random_picks
from skyrl_megatron.algorithms.losses.critic import ppo_critic_loss
from skyrl_megatron.algorithms.losses.cross_entropy import cross_entropy
from skyrl_megatron.algorithms.losses.dppo import dppo
from skyrl_megatron.algorithms.losses.gspo import gspo
from skyrl_megatron.algorithms.losses.importance_sampling import importance_sampling, rollout_is
from skyrl_megatron.algorithms.losses.ppo import dual_clip, regular
from skyrl_megatron.algorithms.losses.sapo import sapo
from skyrl_megatron.algorithms.registry import BaseFunctionRegistry
from skyrl_megatron.config.names import PolicyLossType

__all__ = ["PolicyLossRegistry", "PolicyLossType", "ppo_critic_loss", "register_policy_loss", "seed_random_picks"]


class PolicyLossRegistry(BaseFunctionRegistry):
    """Policy losses by name (``algorithm.policy_loss_type``)."""

    _function_type = "policy loss"


BUILT_IN = {
    PolicyLossType.REGULAR: regular,
    PolicyLossType.DUAL_CLIP: dual_clip,
    PolicyLossType.GSPO: gspo,
    PolicyLossType.CISPO: cispo,
    PolicyLossType.SAPO: sapo,
    PolicyLossType.CLIP_COV: clip_cov,
    PolicyLossType.KL_COV: kl_cov,
    PolicyLossType.CROSS_ENTROPY: cross_entropy,
    PolicyLossType.IMPORTANCE_SAMPLING: importance_sampling,
    PolicyLossType.ROLLOUT_IS: rollout_is,
    PolicyLossType.DPPO: dppo,
}
PolicyLossRegistry.add_builtins(PolicyLossType, BUILT_IN)


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the policy loss ``name``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        PolicyLossRegistry.register(name, function)
        return function

    return decorate
