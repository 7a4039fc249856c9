"""Resolve a configuration for a machine; folders and lengths of a run; omegaconf's ``DictConfig`` as input."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate

from skyrl_megatron import device
from skyrl_megatron.config.derive import derive, fill, supervised
from skyrl_megatron.config.fields import Section, default_of, get_path, owner_of, sections_of
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning

if TYPE_CHECKING:
    from omegaconf import DictConfig


__all__ = ["derive", "fit_to_hardware"]

_ON_CPU: dict[str, tuple[object, str | None]] = {
    # Defaults that differ on CPU.
    # key → (value on CPU, why the usual default is impossible on CPU; None: it is possible if the user sets it)
    "generator.inference_engine.weight_sync_backend": (device.GLOO, "needs GPUs"),
    "generator.inference_engine.model_dtype": ("float32", None),
    "generator.inference_engine.enforce_eager": (True, None),
    "trainer.bf16": (False, None),
    "trainer.flash_attn": (False, "needs GPUs"),
    "trainer.deterministic": (True, None),
}


def fit_to_hardware(cfg: SkyRLTrainConfig, hardware: Hardware) -> list[Problem]:
    """Fill in fields that depend on the machine, and return a Problem for each setting that is impossible on it.

    Changes no value that the user set, and can be called again after a change. Without GPUs: gloo instead of nccl, and
    fp32. ``trainer.strategy=fsdp2`` becomes ``megatron`` with only data parallelism, and a SkyRLMegatronWarning.
    """
    problems = _replace_fsdp(cfg)
    if hardware.is_cpu and cfg.trainer.bf16 and cfg.trainer.is_set("bf16"):
        cfg.trainer.bf16 = False
        warnings.warn(
            "trainer.bf16=true: without GPUs the trainer computes in fp32, as do its memory estimates; "
            "generator.inference_engine.model_dtype sets the dtype of the engines",
            SkyRLMegatronWarning,
            stacklevel=3,
        )
    for key, (on_cpu, impossible) in _ON_CPU.items():
        section, name = owner_of(cfg, key)
        value = on_cpu if hardware.is_cpu else default_of(type(section), name)
        fill(cfg, key, value)
        chosen = get_path(cfg, key)
        if hardware.is_cpu and chosen == default_of(type(section), name) and impossible:
            fix = f"{impossible}: remove this key (its default on CPU is {str(value).lower()}), or run on GPUs"
            problems.append(Problem(key, chosen, fix))
    derive(cfg)  # roles whose layout is copied from the policy
    return problems


def _replace_fsdp(cfg: SkyRLTrainConfig) -> list[Problem]:
    """Replace ``strategy=fsdp…`` by Megatron's equivalent: data parallelism without tp, pp, cp and ep."""
    trainer = cfg.trainer
    if trainer.strategy == "megatron":
        return []
    warnings.warn(
        f"trainer.strategy={trainer.strategy}: this trainer has only the Megatron backend. The run uses data "
        "parallelism with a distributed optimizer (each rank holds the whole model; set "
        "trainer.policy.megatron_config.* to split it)",
        SkyRLMegatronWarning,
        stacklevel=3,
    )
    problems = []
    for degree in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
        key = f"trainer.policy.megatron_config.{degree}_parallel_size"
        value = get_path(cfg, key)
        if value not in (None, 1):
            fix = f"trainer.strategy={trainer.strategy} has only data parallelism: set trainer.strategy=megatron"
            problems.append(Problem(key, value, fix))
    if not problems:
        trainer.strategy = "megatron"
    return problems


type AnyConfig = SkyRLTrainConfig | DictConfig


def typed_config(cfg: AnyConfig) -> SkyRLTrainConfig:
    """Return ``cfg`` itself, or the values of a ``DictConfig`` as typed and checked fields.

    Missing keys get their defaults, and flat keys of older scripts are translated. A ``DictConfig`` does not show
    which values a user set, so a value equal to the default counts as not set (:meth:`Section.is_set`). Raises
    ConfigError with every unknown key and invalid value. Custom keys need a custom class (``make_config``).
    """
    if isinstance(cfg, Section):
        return cfg
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = SkyRLTrainConfig.from_cli_overrides(cfg)
    except OmegaConfBaseException as error:  # an interpolation of a missing key
        raise ConfigError([Problem(error.full_key or "cfg", "", str(error).splitlines()[0])]) from error
    _forget_given(typed)
    derive(typed)
    return typed


def accepts_dict_config[**P, R](check: Callable[Concatenate[SkyRLTrainConfig, P], R]) -> Callable[..., R]:
    """Decorate a function that changes a configuration in place, so that it also accepts and changes a
    ``DictConfig``."""

    @functools.wraps(check)
    def checked(cfg: AnyConfig, *args: P.args, **kwargs: P.kwargs) -> R:
        typed = typed_config(cfg)
        result = check(typed, *args, **kwargs)
        if not isinstance(cfg, Section):
            _write_back(typed, cfg)
        return result

    return checked


def _write_back(typed: SkyRLTrainConfig, cfg: DictConfig) -> None:
    """Replace the content of ``cfg`` by the values of ``typed``, also if Hydra made it read-only."""
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
    """Return the distinct trackers of ``trainer.logger``. wandb needs WANDB_API_KEY or WANDB_MODE."""
    logger = cfg.trainer.logger
    named = dict.fromkeys([logger] if isinstance(logger, str) else logger)
    if not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ:
        named.pop("wandb", None)
    return [name for name in named if name not in ("console", "tensorboard")]


def run_folder(cfg: SkyRLTrainConfig) -> Path:
    """Return ``log_path/project_name/run_name``, the folder of a run's configuration, metrics, report and log."""
    trainer = cfg.trainer
    return Path(trainer.log_path) / trainer.project_name / trainer.run_name


def private_folder(path: Path) -> Path:
    """Create a folder for samples or tokens, and its parents. Returns ``path``.

    Its mode follows the user's umask but gives others no permissions. An existing folder is not changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o770, exist_ok=True)
    return path


def save_config(cfg: SkyRLTrainConfig) -> Path:
    """Write the resolved configuration to ``config.yaml`` in the run's folder; ``--config`` reads it back."""
    path = private_folder(run_folder(cfg)) / "config.yaml"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(get_config_as_yaml_str(cfg))
    temporary.replace(path)
    return path


FULLY_ASYNC = "trainer.fully_async"


def generates_ahead(cfg: SkyRLTrainConfig) -> bool:
    """Return whether responses are sampled while the policy trains, and so can be stale."""
    return cfg.trainer.fully_async.enabled and cfg.trainer.fully_async.max_staleness_steps > 0


def is_reproducible(cfg: SkyRLTrainConfig) -> bool:
    """Return whether two runs sample the same responses. Fully asynchronous runs do not: which weights sample a
    response depends on timing."""
    return bool(cfg.trainer.deterministic) and not generates_ahead(cfg)


def rollouts_folder(cfg: SkyRLTrainConfig) -> tuple[str, str]:
    """Return (folder of the sampled groups, key that sets it)."""
    if cfg.trainer.fully_async.rollouts_path:
        return cfg.trainer.fully_async.rollouts_path, f"{FULLY_ASYNC}.rollouts_path"
    return os.path.join(cfg.trainer.ckpt_path, "rollouts"), "trainer.ckpt_path"


def longest_sequence(cfg: SkyRLTrainConfig) -> int:
    """Return the tokens of the longest possible training sequence, which batches, memory estimates and engines allow
    for: the context of the last turn and its response. Of preferences: of the longest pair."""
    if (rows := supervised(cfg)) is not None:
        return rows.longest
    return (cfg.generator.max_input_length or 0) + cfg.generator.sampling_params.max_generate_length


def longest_pack(cfg: SkyRLTrainConfig) -> tuple[int, int]:
    """Return (number of longest sequences in a full training micro-batch, tokens of each)."""
    trainer, longest = cfg.trainer, longest_sequence(cfg)
    most = trainer.max_tokens_per_microbatch
    return (max(most // longest, 1) if most > 0 else trainer.micro_train_batch_size_per_gpu), longest
