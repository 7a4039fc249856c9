"""Re-exports of ``skyrl_megatron.algorithms`` for scripts written for SkyRL."""

from typing import TYPE_CHECKING, Any

from skyrl_megatron.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageEstimatorRegistry,
    compute_advantages_and_returns,
    register_advantage_estimator,
)
from skyrl_megatron.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_approx_kl,
    get_kl_controller,
)
from skyrl_megatron.algorithms.losses import (
    PolicyLossRegistry,
    PolicyLossType,
    ppo_critic_loss,
    register_policy_loss,
)
from skyrl_megatron.algorithms.masked import masked_mean, masked_token_mean, masked_var, masked_whiten
from skyrl_megatron.algorithms.registry import (
    BaseFunctionRegistry,
    repopulate_all_registries,
    sync_registries,
)
from skyrl_megatron.algorithms.skyrl import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    cross_entropy_loss,
    gspo_policy_loss,
    importance_sampling_loss,
    ppo_policy_loss,
    sapo_policy_loss,
)

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.registry import RegistryActor

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "BaseFunctionRegistry",
    "FixedKLController",
    "PolicyLossRegistry",
    "PolicyLossType",
    "RegistryActor",
    "compute_advantages_and_returns",
    "compute_approx_kl",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "cross_entropy_loss",
    "get_kl_controller",
    "gspo_policy_loss",
    "importance_sampling_loss",
    "masked_mean",
    "masked_token_mean",
    "masked_var",
    "masked_whiten",
    "ppo_critic_loss",
    "ppo_policy_loss",
    "register_advantage_estimator",
    "register_policy_loss",
    "repopulate_all_registries",
    "sapo_policy_loss",
    "sync_registries",
]


def __getattr__(name: str) -> Any:
    if name == "RegistryActor":  # a Ray actor class, which needs Ray
        from skyrl_megatron.algorithms.registry import registry_actor_class

        return registry_actor_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
