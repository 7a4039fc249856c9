"""Fill in fields that depend on other fields, and make paths absolute.

A relative path starts at the working directory of the command. It becomes absolute, so that ``config.yaml`` and every
process of the run, also on other nodes, use the same path.

:func:`derive` runs when a configuration is created, and again when the machine is known (:mod:`.resolve`). It changes
no value that a user set, and recomputes the values that it filled in before.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import Section, get_path, owner_of
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig, correction_enabled
from skyrl_megatron.config.schema.generator import GeneratorConfig, SamplingParams
from skyrl_megatron.config.schema.models import DEFAULT_TRANSFORMER_CONFIG_KWARGS
from skyrl_megatron.config.schema.training import TrainerConfig
from skyrl_megatron.config.table import ESTIMATORS, OTHER_ROLES, ROLES
from skyrl_megatron.hub.repo_names import FILE_SUFFIXES, is_hub_name

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.supervised import DPOConfig, RewardConfig, SFTConfig


def is_address(path: str) -> bool:
    """Return whether ``path`` is a URL such as ``s3://…`` and not a path of the file system."""
    return "://" in path


def is_data_file(name: str) -> bool:
    """Return whether a data set is given as a path, and not as a name on the Hugging Face hub."""
    return not is_address(name) and (name.startswith(("/", "./", "../", "~")) or name.endswith(FILE_SUFFIXES))


def supervised(cfg: Section) -> SFTConfig | None:
    """Return the section of a run that trains on rows of data (``sft``, ``dpo``, ``reward``), samples nothing and
    starts no engines; None for other runs."""
    return getattr(cfg, "sft", None) or preferences(cfg) or reward_model(cfg)


def preferences(cfg: Section) -> DPOConfig | None:
    """Return the section ``dpo`` of a run that trains on preferences; None for other runs."""
    return getattr(cfg, "dpo", None)


def reward_model(cfg: Section) -> RewardConfig | None:
    """Return the section ``reward`` of a run that trains a reward model; None for other runs."""
    return getattr(cfg, "reward", None)


def absolute(path: str) -> str:
    """Return ``path`` as an absolute path with ``~`` expanded. URLs and empty text are returned unchanged."""
    if not path or is_address(path):
        return path
    expanded = os.path.expanduser(path)
    return expanded if os.path.isabs(expanded) else os.path.abspath(expanded)


def _model(path: str) -> str:
    return path if is_hub_name(path) else absolute(path)


def _data(name: str) -> str:
    return absolute(name) if is_data_file(name) or os.path.exists(name) else name


_PATHS: dict[str, Callable[[str], str]] = {
    "data.train_data": _data,
    "data.val_data": _data,
    **{f"trainer.{role}.model.path": _model for role in ROLES},
    **{f"trainer.{role}.megatron_config.torch_profiler_config.save_path": absolute for role in ROLES},
    "trainer.ckpt_path": absolute,
    "trainer.export_path": absolute,
    "trainer.fully_async.rollouts_path": absolute,
    "trainer.fully_async.replay_from": absolute,
    "trainer.log_path": absolute,
    "trainer.resume_path": absolute,
    "generator.inference_engine.http_token_path": absolute,
    "environment.skyrl_gym.text2sql.db_path": absolute,
}


def make_paths_absolute(cfg: Section) -> None:
    """Make every path of a SkyRLTrainConfig absolute. Idempotent."""
    for key, make in _PATHS.items():
        _replace(cfg, key, make)
    for one in get_path(cfg, "data.eval_sets").values():
        if isinstance(one, dict) and isinstance(one.get("data"), list):
            one["data"] = [_data(name) if isinstance(name, str) else name for name in one["data"]]
    teachers: dict[str, str] = get_path(cfg, "trainer.teacher.models")
    teachers.update({name: model if is_address(model) else _model(model) for name, model in teachers.items()})
    if get_path(cfg, "generator.chat_template.source") == "file":
        _replace(cfg, "generator.chat_template.name_or_path", absolute)


def _replace(cfg: Section, key: str, make: Callable[[str], str]) -> None:
    section, name = owner_of(cfg, key)
    value: Any = getattr(section, name)
    if isinstance(value, str):
        setattr(section, name, make(value))
    elif value:
        setattr(section, name, [make(path) for path in value])


def derive(cfg: Section) -> None:
    """Fill in fields that are None, and sections that the user did not set, from other fields. Can be called again
    after changes.

    ``cfg``: a SkyRLTrainConfig. Its class imports this module, so it is not named here.
    """
    trainer: TrainerConfig = get_path(cfg, "trainer")
    generator: GeneratorConfig = get_path(cfg, "generator")
    algorithm, sampling = trainer.algorithm, generator.sampling_params
    _translate_tis(algorithm)
    make_paths_absolute(cfg)

    if (pairs := preferences(cfg)) is not None and pairs.reference_cache:
        pairs.reference_cache = absolute(pairs.reference_cache)
    fill(cfg, "generator.max_input_length", trainer.max_prompt_length)
    assert generator.max_input_length is not None
    fill(cfg, "generator.rope_scaling", trainer.rope_scaling)
    fill(cfg, "generator.rope_theta", trainer.rope_theta)
    greedy = SamplingParams(temperature=0.0, max_generate_length=sampling.max_generate_length)
    fill(cfg, "generator.eval_sampling_params", greedy)
    fill(cfg, "generator.eval_sampling_params.max_generate_length", sampling.max_generate_length)

    rows, sampled = supervised(cfg), generator.max_input_length + sampling.max_generate_length
    fill(cfg, "trainer.algorithm.temperature", sampling.temperature if rows is None else 1.0)
    fill(cfg, "trainer.algorithm.max_seq_len", sampled if rows is None else rows.max_length)
    if correction_enabled(algorithm.off_policy_correction) and sampling.logprobs is None:
        sampling.logprobs = 1

    fill(cfg, "trainer.ref.model.path", trainer.policy.model.path)
    if trainer.ref.model.path == trainer.policy.model.path:
        fill(cfg, "trainer.ref.model.revision", trainer.policy.model.revision)
    for name in ("num_nodes", "num_gpus_per_node"):
        for role in OTHER_ROLES:
            fill(cfg, f"trainer.placement.{role}_{name}", getattr(trainer.placement, f"policy_{name}"))
    placement, engine = trainer.placement, generator.inference_engine
    devices = placement.policy_num_nodes * placement.policy_num_gpus_per_node if placement.colocate_all else 0
    one = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    fill(cfg, "generator.inference_engine.num_engines", max(devices // max(one, 1), 1))
    lora = trainer.policy.model.lora
    if lora.sync_mode == "memory" and "trainer.policy.model.lora.sync_mode" not in _filled(cfg):
        fill(cfg, "trainer.policy.megatron_config.lora_config.merge_lora", False)
    merged = trainer.policy.megatron_config.lora_config.merge_lora
    fill(cfg, "trainer.policy.model.lora.sync_mode", "merged" if merged else "memory")
    fill(cfg, "trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable", True)
    for role in ROLES:
        _fit_recompute(getattr(trainer, role).megatron_config.transformer_config_kwargs)
    for role in OTHER_ROLES:
        fill(cfg, f"trainer.{role}.megatron_config", trainer.policy.megatron_config)
    on_ranks = [model for model in trainer.teacher.models.values() if not is_address(model)]
    if on_ranks:
        fill(cfg, "trainer.teacher.model.path", on_ranks[0])
    row = ESTIMATORS.get(algorithm.advantage_estimator)
    fill(cfg, "trainer.algorithm.distillation.reward_coef", float(row is not None and row.teacher))


def fill(cfg: Section, key: str, value: Any) -> None:
    """Set a field that the user did not set, or that an earlier call filled in and that has not changed since."""
    section, name = owner_of(cfg, key)
    current = getattr(section, name)
    filled = _filled(cfg)
    changed = current != filled[key] if key in filled else section.is_set(name)
    if changed and current is not None:
        return
    setattr(section, name, copy.deepcopy(value))
    filled[key] = copy.deepcopy(value)


def _filled(cfg: Section) -> dict[str, Any]:
    """Return dotted key → value of the fields that were filled in."""
    filled: dict[str, Any] = cfg.__dict__.setdefault("_filled", {})
    return filled


def _fit_recompute(kwargs: dict[str, Any]) -> None:
    """Clear the defaults of full recomputation if ``recompute_granularity=selective``."""
    if kwargs.get("recompute_granularity") == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if kwargs.get(name) == DEFAULT_TRANSFORMER_CONFIG_KWARGS[name]:
                kwargs[name] = None


def _translate_tis(algorithm: AlgorithmConfig) -> None:
    """Translate ``use_tis`` and its cap, the older keys of token-level truncated importance sampling."""
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
