"""Names for scripts written for SkyRL; everything lives in ``skyrl_megatron.algorithms``."""

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
    RegistryActor,
    repopulate_all_registries,
    sync_registries,
)
