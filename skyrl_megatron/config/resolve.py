"""Values that follow from others: the one place where a configuration is filled in.

:func:`derive` needs nothing but the configuration and runs when it is made. :func:`fit_to_hardware` runs once the
machine is known, and turns defaults meant for GPUs into what a CPU can do. Neither touches a value that somebody set.
Both may run again after a change: what they filled in themselves they fill in anew.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.base import owner_of
from skyrl_megatron.config.generator import SamplingParams

if TYPE_CHECKING:
    from skyrl_megatron.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
    from skyrl_megatron.config.root import SkyRLTrainConfig


def derive(cfg: SkyRLTrainConfig) -> None:
    """Fill fields that are None, or sections left untouched, from other fields. May be repeated after changes."""
    trainer, generator = cfg.trainer, cfg.generator
    algorithm, sampling = trainer.algorithm, generator.sampling_params
    _translate_tis(algorithm)

    _fill(cfg, "generator.max_input_length", trainer.max_prompt_length)
    assert generator.max_input_length is not None
    _fill(cfg, "generator.rope_scaling", trainer.rope_scaling)
    _fill(cfg, "generator.rope_theta", trainer.rope_theta)
    greedy = SamplingParams(temperature=0.0, max_generate_length=sampling.max_generate_length)
    _fill(cfg, "generator.eval_sampling_params", greedy)
    _fill(cfg, "generator.eval_sampling_params.max_generate_length", sampling.max_generate_length)

    _fill(cfg, "trainer.algorithm.temperature", sampling.temperature)
    _fill(cfg, "trainer.algorithm.max_seq_len", generator.max_input_length + sampling.max_generate_length)
    if uses_correction(algorithm.off_policy_correction) and sampling.logprobs is None:
        sampling.logprobs = 1

    _fill(cfg, "trainer.ref.model.path", trainer.policy.model.path)
    lora = trainer.policy.model.lora
    if lora.sync_mode == "memory" and "trainer.policy.model.lora.sync_mode" not in _filled(cfg):
        _fill(cfg, "trainer.policy.megatron_config.lora_config.merge_lora", False)
    merged = trainer.policy.megatron_config.lora_config.merge_lora
    _fill(cfg, "trainer.policy.model.lora.sync_mode", "merged" if merged else "memory")
    _fill(cfg, "trainer.ref.megatron_config", trainer.policy.megatron_config)
    _fill(cfg, "trainer.critic.megatron_config", trainer.policy.megatron_config)


def uses_correction(correction: OffPolicyCorrectionConfig) -> bool:
    """True when any part of the off-policy correction is switched on; it then needs the engine's log-probabilities."""
    return any(
        switch is not None
        for switch in (
            correction.tis_ratio_type,
            correction.sequence_mask_metric,
            correction.outlier_token_is_threshold_low,
            correction.outlier_token_is_threshold_high,
            correction.token_mask_is_threshold_low,
            correction.token_mask_is_threshold_high,
        )
    )


def _filled(cfg: SkyRLTrainConfig) -> dict[str, Any]:
    """Dotted key → value, of what this module filled in."""
    filled: dict[str, Any] = cfg.__dict__.setdefault("_filled", {})
    return filled


def _fill(cfg: SkyRLTrainConfig, key: str, value: Any) -> None:
    """Set a field that nobody set, or that an earlier call filled and nobody changed since."""
    section, name = owner_of(cfg, key)
    current = getattr(section, name)
    filled = _filled(cfg)
    if key in filled:
        if current != filled[key]:
            return
    elif section.is_set(name) and current is not None:
        return
    setattr(section, name, copy.deepcopy(value))
    filled[key] = copy.deepcopy(value)


def _translate_tis(algorithm: AlgorithmConfig) -> None:
    """``use_tis`` and its cap, as older scripts spell token-level truncated importance sampling."""
    if not algorithm.use_tis or algorithm.tis_imp_ratio_cap <= 0:
        return
    warnings.warn(
        "trainer.algorithm.use_tis and tis_imp_ratio_cap are now trainer.algorithm.off_policy_correction."
        "tis_ratio_type=token and token_tis_ratio_clip_high",
        DeprecationWarning,
        stacklevel=2,
    )
    algorithm.off_policy_correction.tis_ratio_type = "token"
    algorithm.off_policy_correction.token_tis_ratio_clip_high = algorithm.tis_imp_ratio_cap
    algorithm.use_tis, algorithm.tis_imp_ratio_cap = False, -1.0
