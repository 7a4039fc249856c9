"""Names of the estimators and losses that come with the package, known to the command line before torch is loaded.

Their functions are in :mod:`skyrl_megatron.algorithms`, which cannot be imported when the two lists differ.
"""

from __future__ import annotations

from enum import StrEnum


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
