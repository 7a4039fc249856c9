"""The objective: advantages, policy loss, KL and entropy terms, off-policy correction, dynamic sampling.

The functions are in :mod:`skyrl_megatron.algorithms`; :mod:`skyrl_megatron.config.table` has a row for each loss and
estimator, with the class of its settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, Count, Fraction, NonNegative, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.table import (
    AdvantageEstimator,
    CISPOConfig,
    ClipCovConfig,
    DPPOConfig,
    GAEConfig,
    KLCovConfig,
    PolicyLossType,
    SAPOConfig,
)

__all__ = [
    "OPTIMIZER_DTYPES",
    "AdvantageEstimator",
    "AlgorithmConfig",
    "DistillationConfig",
    "DynamicSamplingConfig",
    "KLCtrlConfig",
    "OffPolicyCorrectionConfig",
    "PolicyLossType",
    "correction_enabled",
    "masks_enabled",
]


@dataclass
class KLCtrlConfig(BaseConfig):
    """Schedule of the KL coefficient if the KL penalty is part of the reward. The first value is `kl_loss_coef`."""

    type: Annotated[str, OneOf("fixed", "adaptive")] = "fixed"
    """`adaptive` changes the coefficient so that the KL approaches `kl_target` (arXiv:1909.08593, section 2.2)."""
    kl_target: Positive = 0.1
    """Target KL divergence of the adaptive controller, in nats."""
    horizon: Count = 10000
    """Number of samples over which the adaptive controller reacts; larger is slower."""


@dataclass
class DynamicSamplingConfig(BaseConfig):
    """Handling of zero-variance groups: prompts whose responses all have the same reward and give no gradient."""

    type: Annotated[str | None, OneOf("filter", "replace")] = None
    """How zero-variance groups are handled. `filter` samples more batches until one is full of prompts with variance
    (DAPO). `replace` replaces zero-variance prompts by other prompts of the same batch (POLARIS). None keeps them."""
    max_sample_batches: Annotated[int, Bounds(1, also=(-1,))] = 30
    """Maximum number of batches sampled for one step, above which the run stops; -1: no limit."""
    min_replace_ratio: Fraction = 0.3
    """Minimum share of prompts with variance for `replace`. With fewer, another batch is sampled."""
    gates: dict[str, Any] = field(default_factory=dict)
    """Gates for finished prompts: `reward`, `length` (`{low, high}`), `staleness` (`{high}`), `nonfinite` (`{}`), or a
    plugin's (`register_gate`). A prompt that one refuses is replaced by another prompt."""


@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    """Correction for the log-prob mismatch between engine and trainer, and for stale responses.

    r = exp(old_logprobs − rollout_logprobs) of each token. Every part needs the engine's log-probabilities
    (`sampling_params.logprobs`).
    """

    tis_ratio_type: Annotated[str | None, OneOf("token", "sequence")] = None
    """Truncated importance sampling: the loss is multiplied by min(r, cap), with r of the token or its product over
    the sequence. None: off."""
    token_tis_ratio_clip_high: Positive = 2.0
    """Cap for `token`; usually 1.5 to 5."""
    sequence_tis_ratio_clip_high: Positive = 5.0
    """Cap for `sequence`; usually 2 to 10."""
    sequence_mask_metric: Annotated[str | None, OneOf("product", "geometric")] = None
    """Drop whole sequences whose product, or geometric mean, of r is outside the limits below. None: off."""
    geo_mask_high: Positive = 1.01
    """Upper limit for `geometric`; mixture-of-experts models may need a wider range."""
    geo_mask_low: NonNegative = 0.99
    """Lower limit for `geometric`."""
    product_mask_high: Positive = 2.0
    """Upper limit for `product`."""
    product_mask_low: NonNegative = 0.5
    """Lower limit for `product`."""
    outlier_token_is_threshold_low: NonNegative | None = None
    """Drop a sequence if any of its tokens has r below this, for example 1e-4. None: off."""
    outlier_token_is_threshold_high: Positive | None = None
    """Drop a sequence if any of its tokens has r above this, for example 100. None: off."""
    token_mask_is_threshold_low: NonNegative | None = None
    """Drop single tokens with r below this. None: off."""
    token_mask_is_threshold_high: Positive | None = None
    """Drop single tokens with r above this. None: off."""
    sequence_error_high: Positive | None = None
    """Drop sequences with a larger mean of e^|log r|. MLPerf Training 6.1 drops those above 2. None: off."""


def correction_enabled(correction: OffPolicyCorrectionConfig | None) -> bool:
    """Return whether any part of the correction is enabled; one threshold of a pair is enough."""
    return correction is not None and (correction.tis_ratio_type is not None or masks_enabled(correction))


def masks_enabled(correction: OffPolicyCorrectionConfig | None) -> bool:
    """Return whether the correction can drop tokens, in addition to those that the loss mask drops."""
    return correction is not None and (
        correction.sequence_mask_metric is not None
        or correction.sequence_error_high is not None
        or correction.outlier_token_is_threshold_low is not None
        or correction.outlier_token_is_threshold_high is not None
        or correction.token_mask_is_threshold_low is not None
        or correction.token_mask_is_threshold_high is not None
    )


@dataclass
class DistillationConfig(BaseConfig):
    """On-policy distillation: a teacher (`trainer.teacher`) scores the policy's samples."""

    reward_coef: NonNegative | None = None
    """Adds this times (log p_teacher − log p_student) of the sampled token to each token's reward. None: 1 with the
    estimator `distillation`, which ignores the environment's rewards; else 0."""
    loss_coef: NonNegative = 0.0
    """Weight in the loss of the divergence between teacher and student at each token (arXiv:2306.13649)."""
    top_k: Count = 16
    """The divergence is computed over this many of the teacher's most likely tokens; all others count as one token."""
    beta: Fraction = 0.0
    """0: KL(teacher ‖ student). 1: KL(student ‖ teacher). In between: the generalised Jensen-Shannon divergence."""
    renormalize: bool = False
    """Scale the probabilities of the `top_k` tokens to a sum of 1, without a token for all others."""
    demonstration: str | None = None
    """Column with the teacher's hint. The teacher is then the policy itself, which reads the hint, such as a worked
    solution, as a system message before the prompt (OPSD, arXiv:2601.18734)."""
    divergence_alone: bool = False
    """The divergence is the whole policy loss, without a policy gradient."""


@dataclass
class AlgorithmConfig(BaseConfig):
    """The policy-gradient objective. Subclass it to add keys for a custom loss or estimator."""

    advantage_estimator: str = "grpo"
    """`grpo`, `rloo`, `reinforce++`, `gae` (needs a critic), `maxrl`, `gdpo`, `rae`, `distillation` (needs a
    teacher), or a name registered with `register_advantage_estimator`. `maxrl` divides by the mean absolute reward of
    the group.
    `gdpo` normalises each reward of `gdpo_weights` separately. `rae` subtracts a running mean of each role."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    """Schedule of the KL coefficient with `use_kl_in_reward`."""
    kl_estimator_type: Annotated[str, OneOf("k1", "k2", "k3", "abs")] = "k3"
    """Estimator of the KL divergence from one sample (joschu.net/blog/kl-approx.html)."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from each token's reward. Excludes `use_kl_loss`."""
    use_kl_loss: bool = True
    """Add the KL to the reference to the loss. Excludes `use_kl_in_reward`."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL term; with `kl_ctrl`, its first value."""
    use_entropy_loss: bool = False
    """Add an entropy bonus to the loss."""
    entropy_loss_coef: float = 0.01
    """Weight of the entropy term."""
    temperature: Positive | None = None
    """Logits are divided by this before log-probabilities are computed. None: `sampling_params.temperature`. Set it if
    samples come from the HTTP endpoint and not from the generator."""
    advantage_batch_normalize: bool = False
    """Normalise advantages to mean 0 and standard deviation 1 over the valid tokens of the batch."""
    value_head_prefix: str = "value_head"
    """Name of the value head in the critic's Hugging Face folder: `<prefix>.weight`, else `score.weight`, [1, hidden
    size]. If the folder has neither, the head is initialised at random from `trainer.seed`."""
    policy_loss_type: str = "regular"
    """`regular` (PPO clip), `dual_clip`, `gspo`, `cispo`, `sapo`, `clip_cov`, `kl_cov`, `cross_entropy`,
    `importance_sampling`, `rollout_is`, `dppo`, `m2po`, or a name registered with `register_policy_loss`."""
    loss_reduction: Annotated[str, OneOf("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")] = (
        "token_mean"
    )
    """Reduction of token losses over an optimizer step. `token_mean`: mean over tokens. `sequence_mean`: mean over
    sequences of their token mean. `seq_mean_token_sum_norm`: mean over sequences of their token sum divided by
    `max_seq_len` (Dr. GRPO). `prompt_mean`: mean over prompts of their token mean. None depends on micro-batches."""
    grpo_norm_by_std: bool = True
    """GRPO divides advantages by the standard deviation of the group's rewards."""
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
    """`dual_clip`: upper bound of the ratio for negative advantages."""
    tis_imp_ratio_cap: float = -1.0
    """Deprecated: `off_policy_correction.token_tis_ratio_clip_high`."""
    use_tis: bool = False
    """Deprecated: `off_policy_correction.tis_ratio_type=token`."""
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    """Correction for the log-prob mismatch between engine and trainer."""
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    """Settings of the loss `sapo`."""
    value_clip: NonNegative = 0.2
    """Maximum change of the critic's values from the old ones, above which the loss is clipped."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Handling of zero-variance groups."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Settings of the loss `clip_cov`."""
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    """Settings of the loss `kl_cov`."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Settings of the loss `cispo`."""
    max_seq_len: Count | None = None
    """Divisor of `seq_mean_token_sum_norm`, in tokens. None: `max_input_length` + `max_generate_length`; set it for
    several turns."""
    dppo: DPPOConfig = field(default_factory=DPPOConfig)
    """Settings of the loss `dppo`."""
    gdpo_weights: dict[str, float] = field(default_factory=dict)
    """Metric → weight in `gdpo`. The metrics are those of the environment."""
    rae_decay: Fraction = 0.95
    """Decay of `rae`."""
    length_penalty: dict[str, Any] = field(default_factory=dict)
    """Of long responses. `{type: overlong, max_length: 4096, buffer: 1024}` or `{type: relative}`, with `coef`
    (docs/guides/algorithms.md). It is subtracted from the rewards."""
    observation_loss_coef: NonNegative = 0.0
    """Weight of the cross-entropy of observations. It is the mean over all tokens of the environment in an optimizer
    step (ECHO, arXiv:2605.24517). Rows whose rewards teach nothing count too. Observations in the prompts of step-wise
    rows are not trained on."""
    m2po_threshold: Positive = 0.04
    """Loss `m2po`: largest mean of (log r)² over the tokens that move away from the engine's policy, as in algorithm 1
    of arXiv:2510.01161. The authors' code clips such tokens instead, and others of them."""
    ratio_anchor: Annotated[str, OneOf("old", "rollout")] = "old"
    """Denominator of the ratio of `regular`, `dual_clip`, `gspo` and `sapo`; as `cispo.anchor`. `rollout`: for stale
    samples."""
    nonfinite: Annotated[str, OneOf("error", "skip")] = "error"
    """Handling of NaN or infinite rewards and log-probabilities: `error` stops the run, `skip` masks and counts the
    sample."""
    gae: GAEConfig = field(default_factory=GAEConfig)
    """Settings of the estimator `gae`."""
    skip_untrained_tokens: bool = True
    """`gae` and `reinforce++` skip untrained tokens (tool outputs, user turns, masked responses). The next step of a
    trained token is the next trained token, a reward in between is added to the first, and only trained tokens are
    whitened. False: values and rewards pass through all tokens, as in SkyRL, although the critic is not trained on
    all of them."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Learning from a teacher."""


OPTIMIZER_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "uint8",
    **{name: name for name in ("float32", "bfloat16", "float16")},
}
"""Names of dtypes in ``optimizer_config_kwargs`` → torch's names. FP8 moments are uint8 with a scale (Transformer
Engine)."""
