"""What a configuration becomes on a given machine: defaults meant for GPUs turn into what a CPU can do."""

from __future__ import annotations

import warnings

from skyrl_megatron import device
from skyrl_megatron.config.derive import derive, fill
from skyrl_megatron.config.fields import default_of, get_path, owner_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.schema.root import SkyRLTrainConfig
from skyrl_megatron.errors import Problem, SkyRLMegatronWarning

__all__ = ["derive", "fit_to_hardware"]

_ON_CPU: dict[str, tuple[object, str | None]] = {
    # What a CPU cannot do, or does at no cost; all other defaults are the same on every device.
    # key → (value on CPU, why the usual default is impossible there; None: possible when asked for)
    "generator.inference_engine.weight_sync_backend": (device.GLOO, "needs GPUs"),
    "generator.inference_engine.model_dtype": ("float32", None),
    "trainer.bf16": (False, None),
    "trainer.flash_attn": (False, "needs GPUs"),
    "trainer.deterministic": (True, None),
}


def fit_to_hardware(cfg: SkyRLTrainConfig, hardware: Hardware) -> list[Problem]:
    """Give fields that depend on the machine their value, and name settings that are impossible on it.

    Touches no value that somebody set, and may run again after a change. Without GPUs: gloo instead of nccl, and fp32.
    ``trainer.strategy=fsdp2`` becomes ``megatron`` with data parallelism alone, with one SkyRLMegatronWarning.
    """
    problems = _replace_fsdp(cfg)
    if hardware.is_cpu and cfg.trainer.bf16 and cfg.trainer.is_set("bf16"):
        cfg.trainer.bf16 = False
        warnings.warn(
            "trainer.bf16=true: without GPUs the trainer computes in fp32, and counts its bytes so; "
            "generator.inference_engine.model_dtype is the engines'",
            SkyRLMegatronWarning,
            stacklevel=3,
        )
    for key, (on_cpu, impossible) in _ON_CPU.items():
        section, name = owner_of(cfg, key)
        value = on_cpu if hardware.is_cpu else default_of(type(section), name)
        fill(cfg, key, value)
        chosen = get_path(cfg, key)
        if hardware.is_cpu and chosen == default_of(type(section), name) and impossible:
            fix = f"{impossible}: leave it out (then {str(value).lower()}) or run on GPUs"
            problems.append(Problem(key, chosen, fix))
    fill(cfg, "trainer.policy.megatron_config.empty_cuda_cache", cfg.trainer.placement.colocate_all)
    derive(cfg)  # roles that are laid out as the policy follow it
    return problems


def _replace_fsdp(cfg: SkyRLTrainConfig) -> list[Problem]:
    """Replace ``strategy=fsdp…`` by what Megatron has for it: dp without tp, pp, cp and ep."""
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
