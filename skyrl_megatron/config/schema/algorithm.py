"""What is optimised: advantages, policy loss, KL and entropy terms, off-policy correction, dynamic sampling.

Their functions are in :mod:`skyrl_megatron.algorithms`, which cannot be imported when the two lists differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from skyrl_megatron.config.fields import Bounds, Count, Fraction, NonNegative, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig


@dataclass
class KLCtrlConfig(BaseConfig):
    """Course of the KL coefficient where the penalty is part of the reward. It starts at `kl_loss_coef`."""

    type: Annotated[str, OneOf("fixed", "adaptive")] = "fixed"
    """`adaptive` moves the coefficient so that the KL approaches `kl_target` (arXiv:1909.08593, section 2.2)."""
    kl_target: Positive = 0.1
    """KL divergence, in nats, that the adaptive controller steers to."""
    horizon: Count = 10000
    """Samples over which the adaptive controller reacts; larger is slower."""


@dataclass
class SAPOConfig(BaseConfig):
    """Soft gate of the loss `sapo` (arXiv:2511.20347)."""

    tau_pos: Positive = 1.0
    """Temperature of the gate for tokens with positive advantage."""
    tau_neg: Positive = 1.05
    """Temperature of the gate for the others."""


@dataclass
class DynamicSamplingConfig(BaseConfig):
    """What to do with prompts whose responses all got the same reward, and so teach nothing."""

    type: Annotated[str | None, OneOf("filter", "replace")] = None
    """`filter` samples further batches until one is full of useful prompts (DAPO); `replace` puts useful prompts of
    the same batch in their place (POLARIS); None keeps them."""
    max_sample_batches: Annotated[int, Bounds(1, also=(-1,))] = 30
    """Batches that may be sampled for one step before the run stops; -1 never stops."""
    min_replace_ratio: Fraction = 0.3
    """`replace` needs at least this share of useful prompts; below it a further batch is sampled."""


@dataclass
class ClipCovConfig(BaseConfig):
    """Loss `clip_cov`: tokens with high covariance between log-probability and advantage are detached."""

    clip_ratio: Fraction = 0.0002
    """Share of tokens detached."""
    clip_cov_lb: float = 1.0
    """They are drawn from tokens whose covariance lies above this …"""
    clip_cov_ub: float = 5.0
    """… and below this."""


@dataclass
class KLCovConfig(BaseConfig):
    """Loss `kl_cov`: tokens with the highest covariance get a KL penalty."""

    kl_cov_frac: Fraction = 0.2
    """Share of tokens penalised."""
    ppo_kl_coef: NonNegative = 1.0
    """Weight of the penalty."""


@dataclass
class CISPOConfig(BaseConfig):
    """Loss `cispo` (arXiv:2506.13585): REINFORCE weighted by a clipped importance ratio."""

    cispo_eps_clip_low: NonNegative = 0.0
    """The ratio is clipped below at 1 minus this."""
    cispo_eps_clip_high: NonNegative = 5.0
    """The ratio is clipped above at 1 plus this."""
    anchor: Annotated[str, OneOf("old", "rollout")] = "old"
    """Denominator of the ratio: the policy before the update, or the engine's log-probabilities; `rollout` corrects
    for the engine by itself and refuses `off_policy_correction.tis_ratio_type`."""


@dataclass
class DPPOConfig(BaseConfig):
    """Loss `dppo` (arXiv:2602.04879): a token is masked when it has moved too far from the rollout policy."""

    dppo_type: Annotated[str, OneOf("binary_tv", "binary_kl")] = "binary_tv"
    """Measure of the move of the sampled token's probability: total variation or KL, both on {token, not token}."""
    delta_low: NonNegative = 0.2
    """Largest move for tokens with negative advantage; about 0.2 for `binary_tv`, 0.05 for `binary_kl`."""
    delta_high: NonNegative = 0.2
    """Largest move for tokens with positive advantage."""


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Correction for engines that sample from slightly other probabilities than the trainer computes.

    With r = exp(old_logprobs − rollout_logprobs) per token. Any of these switched on needs the engine's
    log-probabilities (`sampling_params.logprobs`).
    """

    tis_ratio_type: Annotated[str | None, OneOf("token", "sequence")] = None
    """Truncated importance sampling: the loss is weighted by min(r, cap), per token or by the product over a sequence.
    None: off."""
    token_tis_ratio_clip_high: Positive = 2.0
    """Cap for `token`; 1.5 to 5 is usual."""
    sequence_tis_ratio_clip_high: Positive = 5.0
    """Cap for `sequence`; 2 to 10 is usual."""
    sequence_mask_metric: Annotated[str | None, OneOf("product", "geometric")] = None
    """Drop whole sequences whose product, or geometric mean, of r lies outside the limits below. None: off."""
    geo_mask_high: Positive = 1.01
    """Upper limit for `geometric`; mixture-of-experts models may need a wider range."""
    geo_mask_low: NonNegative = 0.99
    """Lower limit for `geometric`."""
    product_mask_high: Positive = 2.0
    """Upper limit for `product`."""
    product_mask_low: NonNegative = 0.5
    """Lower limit for `product`."""
    outlier_token_is_threshold_low: NonNegative | None = None
    """Drop a sequence when any of its tokens has r below this (1e-4, say). None: off."""
    outlier_token_is_threshold_high: Positive | None = None
    """Drop a sequence when any of its tokens has r above this (100, say). None: off."""
    token_mask_is_threshold_low: NonNegative | None = None
    """Drop single tokens with r below this. None: off."""
    token_mask_is_threshold_high: Positive | None = None
    """Drop single tokens with r above this. None: off."""


def correction_enabled(correction: OffPolicyCorrectionConfig | None) -> bool:
    """Return whether any part of the correction is switched on; one threshold of a pair is enough."""
    return correction is not None and (correction.tis_ratio_type is not None or masks_enabled(correction))


def masks_enabled(correction: OffPolicyCorrectionConfig | None) -> bool:
    """Return whether the correction can drop tokens, so that the mask in effect is more than the loss mask."""
    return correction is not None and (
        correction.sequence_mask_metric is not None
        or correction.outlier_token_is_threshold_low is not None
        or correction.outlier_token_is_threshold_high is not None
        or correction.token_mask_is_threshold_low is not None
        or correction.token_mask_is_threshold_high is not None
    )


@dataclass
class GAEConfig(BaseConfig):
    """Estimator `gae`: where the λ of the policy's advantages and that of the critic's returns part."""

    critic_lambd: Fraction | None = None
    """λ of the returns that the critic learns; 1 regresses to the rewards that follow (arXiv:2503.01491).
    None: `lambd`."""
    length_adaptive_alpha: Positive | None = None
    """λ of the policy is 1 − 1/(this · length of the response), at least 0 (arXiv:2504.05118; 0.05 there).
    None: `lambd` for every length."""
    bootstrap_truncated: bool = False
    """Bootstrap the return of a response that was cut off (stop reason `length`) from the critic's value at its last
    token. False: such a response ends like any other, with nothing after it."""


@dataclass
class DistillationConfig(BaseConfig):
    """On-policy distillation: what a teacher (`trainer.teacher`) says of the policy's own samples."""

    reward_coef: NonNegative | None = None
    """Each token's reward gets this times log p_teacher − log p_student of the token that was sampled. None: 1 with
    the estimator `distillation`, which leaves the environment's rewards out, else 0."""
    loss_coef: NonNegative = 0.0
    """Weight in the loss of the divergence of both distributions at each token (arXiv:2306.13649)."""
    top_k: Count = 16
    """The divergence is over this many of the teacher's likeliest tokens, and all others as one more outcome."""
    beta: Fraction = 0.0
    """0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between them their generalised Jensen-Shannon divergence."""
    renormalize: bool = False
    """Scale the probabilities of the `top_k` tokens to a sum of 1 in place of the outcome for all others."""
    divergence_alone: bool = False
    """The divergence is the whole policy loss: no policy gradient beside it."""


@dataclass
class AlgorithmConfig(BaseConfig):
    """The policy-gradient objective. Subclass it to give a custom loss or estimator its own keys."""

    advantage_estimator: str = "grpo"
    """`grpo`, `rloo`, `reinforce++`, `gae` (needs a critic), `maxrl`, `distillation` (needs a teacher), or a name
    registered with `register_advantage_estimator`. `maxrl` divides by the mean size of the group's rewards, which is
    their mean unless some are negative."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Course of the coefficient while `use_kl_in_reward`."""
    kl_estimator_type: Annotated[str, OneOf("k1", "k2", "k3", "abs")] = "k3"
    """Estimate of the KL divergence from one sample (joschu.net/blog/kl-approx.html)."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from each token's reward. Excludes `use_kl_loss`."""
    use_kl_loss: bool = True
    """Add the KL to the reference to the loss. Excludes `use_kl_in_reward`."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL term, and first value of the controller."""
    use_entropy_loss: bool = False
    """Reward entropy in the loss."""
    entropy_loss_coef: float = 0.01
    """Weight of the entropy term."""
    temperature: Positive | None = None
    """Logits are divided by it before log-probabilities are taken. None: `sampling_params.temperature`. To be set by
    hand when sampling goes past the generator, through the HTTP endpoint."""
    advantage_batch_normalize: bool = False
    """Shift and scale advantages to mean 0 and deviation 1 over the valid tokens of the batch."""
    value_head_prefix: str = "value_head"
    """Name of the value head in the critic's Hugging Face folder: `<prefix>.weight`, else `score.weight`, [1, hidden
    size]. A folder without either gets a head drawn from `trainer.seed`."""
    policy_loss_type: str = "regular"
    """`regular` (PPO clip), `dual_clip`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `cross_entropy`,
    `importance_sampling`, `rollout_is`, `dppo`, or a name registered with `register_policy_loss`."""
    loss_reduction: Annotated[str, OneOf("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")] = (
        "token_mean"
    )
    """How token losses become one number: mean over the tokens of the optimizer step; mean over sequences of their
    mean; mean over sequences of their sum divided by `max_seq_len` (Dr. GRPO); mean over prompts of their token
    mean. None of them depends on how the batch is cut."""
    grpo_norm_by_std: bool = True
    """GRPO divides by the standard deviation of the group's rewards."""
    zero_variance_filter: bool = False
    """Mask the responses of prompts whose rewards are all equal."""
    lambd: Fraction = 1.0
    """λ of generalised advantage estimation."""
    gamma: Fraction = 1.0
    """Discount per token."""
    eps_clip_low: NonNegative = 0.2
    """The PPO ratio is clipped below at 1 minus this."""
    eps_clip_high: NonNegative = 0.2
    """The PPO ratio is clipped above at 1 plus this."""
    clip_ratio_c: Annotated[float, Bounds(1, open_low=True)] = 3.0
    """`dual_clip`: bound of the ratio for negative advantages."""
    tis_imp_ratio_cap: float = -1.0
    """Deprecated: `off_policy_correction.token_tis_ratio_clip_high`."""
    use_tis: bool = False
    """Deprecated: `off_policy_correction.tis_ratio_type=token`."""
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    """Correction for the difference between engine and trainer."""
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    """Settings of the loss `sapo`."""
    value_clip: NonNegative = 0.2
    """The critic's values may move this far from the old ones before the loss is clipped."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Prompts that teach nothing."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Settings of the loss `clip_cov`."""
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    """Settings of the loss `kl_cov`."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Settings of the loss `cispo`."""
    max_seq_len: Count | None = None
    """Tokens by which `seq_mean_token_sum_norm` divides. None: `max_input_length` + `max_generate_length`; set it by
    hand for several turns."""
    dppo: DPPOConfig = field(default_factory=DPPOConfig)
    """Settings of the loss `dppo`."""
    nonfinite: Annotated[str, OneOf("error", "skip")] = "error"
    """NaN or infinite rewards and log-probabilities stop the run, or their sample is masked and counted."""
    gae: GAEConfig = field(default_factory=GAEConfig)
    """Settings of the estimator `gae`."""
    skip_untrained_tokens: bool = True
    """`gae` and `reinforce++` pass over tokens that are not trained (tool outputs, user turns, masked responses): the
    step after a trained token is the next trained one, a reward between them counts for the first, and trained tokens
    alone are whitened. False: values and rewards flow through all tokens of the response, as in SkyRL, though no loss
    teaches the critic the values of some."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Learning from a teacher."""


class AdvantageEstimator(StrEnum):
    """Built-in estimators (``trainer.algorithm.advantage_estimator``)."""

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce++"
    GAE = "gae"
    MAXRL = "maxrl"
    DISTILLATION = "distillation"


class PolicyLossType(StrEnum):
    """Built-in losses (``trainer.algorithm.policy_loss_type``)."""

    REGULAR = "regular"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    ROLLOUT_IS = "rollout_is"
    DPPO = "dppo"


OPTIMIZER_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "uint8",
    **{name: name for name in ("float32", "bfloat16", "float16")},
}
"""Names of types in ``optimizer_config_kwargs`` → torch's. FP8 moments are bytes with a scale (Transformer Engine)."""
