"""Values that follow from others: the one place where a configuration is filled in.

:func:`derive` needs nothing but the configuration and runs when it is made. :func:`fit_to_hardware` runs once the
machine is known, and turns defaults meant for GPUs into what a CPU can do. Neither touches a value that somebody set.
Both may run again after a change: what they filled in themselves they fill in anew.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.config.schema.base import default_of, get_path, owner_of
from skyrl_megatron.config.schema.generator import SamplingParams
from skyrl_megatron.config.schema.megatron import DEFAULT_TRANSFORMER_CONFIG_KWARGS
from skyrl_megatron.errors import Problem, SkyRLMegatronWarning

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig


_PATHS = (
    "data.train_data",
    "data.val_data",
    "trainer.policy.model.path",
    "trainer.ref.model.path",
    "trainer.critic.model.path",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.log_path",
    "trainer.resume_path",
    "generator.inference_engine.http_token_path",
    "environment.skyrl_gym.text2sql.db_path",
)


def derive(cfg: SkyRLTrainConfig) -> None:
    """Fill fields that are None, or sections left untouched, from other fields. May be repeated after changes."""
    trainer, generator = cfg.trainer, cfg.generator
    algorithm, sampling = trainer.algorithm, generator.sampling_params
    _translate_tis(algorithm)
    _expand_home(cfg)

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
    for name in ("num_nodes", "num_gpus_per_node"):
        for role in ("ref", "critic"):
            _fill(cfg, f"trainer.placement.{role}_{name}", getattr(trainer.placement, f"policy_{name}"))
    lora = trainer.policy.model.lora
    if lora.sync_mode == "memory" and "trainer.policy.model.lora.sync_mode" not in _filled(cfg):
        _fill(cfg, "trainer.policy.megatron_config.lora_config.merge_lora", False)
    merged = trainer.policy.megatron_config.lora_config.merge_lora
    _fill(cfg, "trainer.policy.model.lora.sync_mode", "merged" if merged else "memory")
    _fill(cfg, "trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable", True)
    for megatron in (trainer.policy.megatron_config, trainer.ref.megatron_config, trainer.critic.megatron_config):
        _fit_recompute(megatron.transformer_config_kwargs)
    _fill(cfg, "trainer.ref.megatron_config", trainer.policy.megatron_config)
    _fill(cfg, "trainer.critic.megatron_config", trainer.policy.megatron_config)


_ON_CPU: dict[str, tuple[object, str | None]] = {
    # key → (value on CPU, why its default is impossible there; None: possible when asked for)
    "generator.inference_engine.weight_sync_backend": (device.GLOO, "needs GPUs"),
    "generator.inference_engine.model_dtype": ("float32", None),
    "trainer.bf16": (False, None),
    "trainer.flash_attn": (False, "needs GPUs"),
    "trainer.placement.colocate_all": (False, "there is no GPU memory to take turns with"),
    "trainer.placement.colocate_policy_ref": (False, "there is no GPU memory to take turns with"),
}


def fit_to_hardware(cfg: SkyRLTrainConfig, hardware: Hardware) -> list[Problem]:
    """Give fields that depend on the machine their value, and name settings that are impossible on it.

    Without GPUs: gloo instead of nccl, separate placement, fp32. ``trainer.strategy=fsdp2`` becomes ``megatron`` with
    data parallelism alone, with one SkyRLMegatronWarning.
    """
    problems = _replace_fsdp(cfg)
    _fill(cfg, "trainer.deterministic", hardware.is_cpu)
    _fill(cfg, "generator.inference_engine.weight_sync_probe_interval", 1 if hardware.is_cpu else 20)
    for key, (on_cpu, impossible) in _ON_CPU.items():
        section, name = owner_of(cfg, key)
        value = on_cpu if hardware.is_cpu else default_of(type(section), name)
        _fill(cfg, key, value)
        chosen = get_path(cfg, key)
        if hardware.is_cpu and chosen == default_of(type(section), name) and impossible:
            fix = f"{impossible}: leave it out (then {str(value).lower()}) or run on GPUs"
            problems.append(Problem(key, chosen, fix))
    _fill(cfg, "trainer.policy.megatron_config.empty_cuda_cache", cfg.trainer.placement.colocate_all)
    derive(cfg)  # roles laid out as the policy follow it
    return problems


def _replace_fsdp(cfg: SkyRLTrainConfig) -> list[Problem]:
    """``strategy=fsdp…`` as Megatron does it: no tensor, pipeline, context or expert parallelism."""
    trainer = cfg.trainer
    if trainer.strategy == "megatron":
        return []
    warnings.warn(
        f"trainer.strategy={trainer.strategy}: this trainer has one backend. The run uses Megatron's equivalent, data "
        "parallelism with a distributed optimizer (each rank holds the whole model; trainer.policy.megatron_config.* "
        "splits it)",
        SkyRLMegatronWarning,
        stacklevel=3,
    )
    problems = []
    for degree in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
        key = f"trainer.policy.megatron_config.{degree}_parallel_size"
        value = get_path(cfg, key)
        if value not in (None, 1):
            problems.append(Problem(key, value, f"set trainer.strategy=megatron: {trainer.strategy} is dp alone"))
    if not problems:
        trainer.strategy = "megatron"
    return problems


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
    changed = current != filled[key] if key in filled else section.is_set(name)
    if changed and current is not None:
        return
    setattr(section, name, copy.deepcopy(value))
    filled[key] = copy.deepcopy(value)


def _fit_recompute(kwargs: dict[str, Any]) -> None:
    """The defaults of full recomputation go when ``recompute_granularity=selective`` is set beside them."""
    if kwargs.get("recompute_granularity") == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if kwargs.get(name) == DEFAULT_TRANSFORMER_CONFIG_KWARGS[name]:
                kwargs[name] = None


def _expand_home(cfg: SkyRLTrainConfig) -> None:
    """``~`` in paths: a shell does not expand it behind ``key=``."""
    for key in _PATHS:
        section, name = owner_of(cfg, key)
        value = getattr(section, name)
        if isinstance(value, str):
            setattr(section, name, os.path.expanduser(value))
        elif value:
            setattr(section, name, [os.path.expanduser(path) for path in value])


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
