"""Every member of the registries, without Ray."""

from enum import StrEnum

from skyrl_megatron.utils.ppo_utils import (
    AdvantageEstimator,
    AdvantageEstimatorRegistry,
    BaseFunctionRegistry,
    PolicyLossRegistry,
    PolicyLossType,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    cross_entropy_loss,
    gspo_policy_loss,
    importance_sampling_loss,
    ppo_policy_loss,
    register_advantage_estimator,
    register_policy_loss,
    sapo_policy_loss,
)

estimators = [
    AdvantageEstimator.GAE,
    AdvantageEstimator.GRPO,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.REINFORCE_PP,
]
losses = [
    PolicyLossType.REGULAR,
    PolicyLossType.DUAL_CLIP,
    PolicyLossType.GSPO,
    PolicyLossType.CISPO,
    PolicyLossType.CLIP_COV,
    PolicyLossType.KL_COV,
    PolicyLossType.SAPO,
    PolicyLossType.CROSS_ENTROPY,
    PolicyLossType.IMPORTANCE_SAMPLING,
]
built_in = [
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    cross_entropy_loss,
    gspo_policy_loss,
    importance_sampling_loss,
    ppo_policy_loss,
    sapo_policy_loss,
]


class Mine(StrEnum):
    ESTIMATOR = "by_enum"


class ScheduleRegistry(BaseFunctionRegistry):
    _actor_name = "schedule_registry"
    _function_type = "schedule"


ScheduleRegistry.register(name="linear", func=lambda step: step)
schedules = ScheduleRegistry.list_available()


@register_advantage_estimator(Mine.ESTIMATOR)
def compute_mine(token_level_rewards, response_mask, index, **kwargs):
    return token_level_rewards, token_level_rewards


@register_policy_loss("by_name")
def compute_mine_too(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    return -log_probs, 0.0


found = [AdvantageEstimatorRegistry.get("by_enum"), PolicyLossRegistry.get("by_name")]
AdvantageEstimatorRegistry.unregister(Mine.ESTIMATOR)
PolicyLossRegistry.unregister("by_name")
names_left = AdvantageEstimatorRegistry.list_available() + PolicyLossRegistry.list_available()

AdvantageEstimatorRegistry.reset()
PolicyLossRegistry.reset()
names_after_reset = AdvantageEstimatorRegistry.list_available() + PolicyLossRegistry.list_available()
AdvantageEstimatorRegistry.repopulate_registry()
PolicyLossRegistry.repopulate_registry()
names_again = AdvantageEstimatorRegistry.list_available() + PolicyLossRegistry.list_available()
AdvantageEstimatorRegistry.repopulate()
PolicyLossRegistry.repopulate()
names_at_last = AdvantageEstimatorRegistry.list_available() + PolicyLossRegistry.list_available()
ScheduleRegistry.reset()
