"""What a configuration becomes on a given machine, the folder of its run, and omegaconf's ``DictConfig`` as input."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate

from skyrl_megatron import device
from skyrl_megatron.config.derive import derive, fill
from skyrl_megatron.config.fields import Section, default_of, get_path, owner_of, sections_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning

if TYPE_CHECKING:
    from omegaconf import DictConfig


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


type AnyConfig = SkyRLTrainConfig | DictConfig


def typed_config(cfg: AnyConfig) -> SkyRLTrainConfig:
    """Return ``cfg`` itself, or the values of a ``DictConfig`` as typed and checked fields.

    Keys that are left out take their defaults, flat ones of older scripts are translated. A ``DictConfig`` does not
    tell what somebody asked for from what its file holds anyway: values equal to the default count as not asked for
    (:meth:`Section.is_set`). Raises ConfigError with every unknown key and wrong value; keys of one's own need a class
    of one's own (``make_config``).
    """
    if isinstance(cfg, Section):
        return cfg
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = SkyRLTrainConfig.from_cli_overrides(cfg)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError([Problem(error.full_key or "cfg", "", str(error).splitlines()[0])]) from error
    _forget_given(typed)
    derive(typed)
    return typed


def accepts_dict_config[**P, R](check: Callable[Concatenate[SkyRLTrainConfig, P], R]) -> Callable[..., R]:
    """Let a function that changes a configuration in place take a ``DictConfig`` too, changed alike (a decorator)."""

    @functools.wraps(check)
    def checked(cfg: AnyConfig, *args: P.args, **kwargs: P.kwargs) -> R:
        typed = typed_config(cfg)
        result = check(typed, *args, **kwargs)
        if not isinstance(cfg, Section):
            _write_back(typed, cfg)
        return result

    return checked


def _write_back(typed: SkyRLTrainConfig, cfg: DictConfig) -> None:
    """Give ``cfg`` the values of ``typed``, all keys and no others, whether Hydra locked it or not."""
    from omegaconf import OmegaConf, open_dict, read_write

    values = OmegaConf.create(get_config_as_yaml_str(typed))
    with read_write(cfg), open_dict(cfg):
        cfg.clear()
        cfg.update(values)


def _forget_given(section: Section) -> None:
    section.__dict__["_given"] = frozenset()
    for name in sections_of(type(section)):
        inner = getattr(section, name)
        if isinstance(inner, Section):
            _forget_given(inner)


def trackers(cfg: SkyRLTrainConfig) -> list[str]:
    """Return the trackers of ``trainer.logger``, each once; wandb with a key, or a mode without one."""
    logger = cfg.trainer.logger
    named = dict.fromkeys([logger] if isinstance(logger, str) else logger)
    if not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ:
        named.pop("wandb", None)
    return [name for name in named if name not in ("console", "tensorboard")]


def run_folder(cfg: SkyRLTrainConfig) -> Path:
    """Return ``log_path/project_name/run_name``, where config, metrics, report and console log of a run are."""
    trainer = cfg.trainer
    return Path(trainer.log_path) / trainer.project_name / trainer.run_name


def private_folder(path: Path) -> Path:
    """Make a folder, and those above it, for samples or tokens: its mode is that of the user's umask, without what it
    would let others than the group do. One that is there stays as it is. Returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o770, exist_ok=True)
    return path


def save_config(cfg: SkyRLTrainConfig) -> Path:
    """Write the resolved configuration to ``config.yaml`` in the run's folder; ``--config`` reads it back."""
    path = private_folder(run_folder(cfg)) / "config.yaml"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(get_config_as_yaml_str(cfg))
    beside.replace(path)
    return path
