"""Rules of teachers and of several adapters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import field_types
from skyrl_megatron.config.parse import Mismatch, convert
from skyrl_megatron.config.roles import (
    ADAPTERS_KEY,
    OF_ALL_ADAPTERS,
    adapter_section,
    has_teacher,
    teacher_addresses,
    teacher_is_reward_model,
)
from skyrl_megatron.config.table import ESTIMATORS
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_A, _TEACHERS = "trainer.algorithm.", "trainer.teacher.models"


def _rewards_by_teacher(algorithm: AlgorithmConfig) -> bool:
    row = ESTIMATORS.get(algorithm.advantage_estimator)
    return row is not None and row.teacher


def teacher_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield every problem of teachers and distillation settings."""
    algorithm, teacher = cfg.trainer.algorithm, cfg.trainer.teacher
    wanted = algorithm.distillation
    if wanted.demonstration is not None:
        yield from _self_distillation_problems(cfg)
    elif not has_teacher(cfg):
        if _rewards_by_teacher(algorithm) or wanted.reward_coef or wanted.loss_coef:
            fix = "distillation needs a teacher: set it, or set trainer.teacher.models"
            yield Problem("trainer.teacher.model.path", None, fix)
        return
    if teacher.models and teacher.model.path not in (None, *teacher.models.values()):
        fix = f"is not in {_TEACHERS}: add it there, or remove this key"
        yield Problem("trainer.teacher.model.path", teacher.model.path, fix)
    for name in teacher.models:
        if not _NAME.fullmatch(name):
            yield Problem(_TEACHERS, name, "names the teacher in rows: use letters, digits, _ and -")
    if not wanted.reward_coef and not wanted.loss_coef:
        fix = (
            "the run does not learn from this teacher: set distillation.reward_coef or .loss_coef, or set "
            "advantage_estimator=distillation"
        )
        key, value = (
            (_TEACHERS, teacher.models) if teacher.models else ("trainer.teacher.model.path", teacher.model.path)
        )
        if wanted.demonstration is not None:
            key, value = f"{_A}distillation.demonstration", wanted.demonstration
        yield Problem(key, value, fix)
    if teacher_is_reward_model(cfg):
        fix = "is for log-probs, but the teacher is a reward model: remove this key, and set distillation.reward_coef"
        for option, setting, unwanted in (
            (f"{_A}distillation.loss_coef", wanted.loss_coef, wanted.loss_coef > 0),
            (f"{_A}advantage_estimator", algorithm.advantage_estimator, _rewards_by_teacher(algorithm)),
            (_TEACHERS, ", ".join(teacher.models), bool(teacher.models)),
        ):
            if unwanted:
                yield Problem(option, setting, fix)
    if wanted.divergence_alone and not wanted.loss_coef:
        fix = "the divergence is the whole loss but has weight 0: set distillation.loss_coef"
        yield Problem(f"{_A}distillation.divergence_alone", True, fix)
    if wanted.loss_coef and cfg.trainer.fused_lm_head_logprob:
        yield Problem("trainer.fused_lm_head_logprob", True, "distillation.loss_coef needs logits: set it to false")
    for name, address in teacher_addresses(cfg).items():
        if algorithm.temperature not in (None, 1.0):
            fix = f"the engine at {address} returns log-probs at temperature 1: set it to 1, or run {name} on ranks"
            yield Problem("generator.sampling_params.temperature", algorithm.temperature, fix)


def _self_distillation_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what contradicts a teacher that is the policy itself."""
    key, column = f"{_A}distillation.demonstration", cfg.trainer.algorithm.distillation.demonstration
    if has_teacher(cfg):
        yield Problem(key, column, "the policy is the teacher then: remove this key, or trainer.teacher")
    if cfg.trainer.policy.megatron_config.moe_enable_routing_replay:
        fix = (
            "the engine has no routes of the tokens of a hint: set moe_enable_routing_replay=false, or remove this key"
        )
        yield Problem(key, column, fix)


def adapter_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield every problem of the names and settings of several adapters."""
    lora, trainer = cfg.trainer.policy.model.lora, cfg.trainer
    if not lora.adapters:
        return
    if not lora.rank:
        fix = "adapters are disabled (rank=0): set trainer.policy.model.lora.rank"
        yield Problem(ADAPTERS_KEY, ", ".join(lora.adapters), fix)
    for name, changes in lora.adapters.items():
        if not _NAME.fullmatch(name):
            yield Problem(
                ADAPTERS_KEY, name, "invalid name, as folders and requests use it: use letters, digits, _ and -"
            )
        for key, value in (changes or {}).items():
            yield from _adapter_setting_problems(cfg, f"{ADAPTERS_KEY}.{name}.{key}", key, value)
    if len(lora.adapters) > 1 and trainer.algorithm.use_kl_in_reward and trainer.algorithm.kl_ctrl.type == "adaptive":
        fix = "the adaptive KL coefficient supports one adapter: set it to fixed, or train one adapter per run"
        yield Problem("trainer.algorithm.kl_ctrl.type", "adaptive", fix)
    if len(lora.adapters) > 1 and trainer.critic.model.path is not None:
        fix = "a critic supports one adapter: use an advantage estimator without a critic, and remove this key"
        yield Problem("trainer.critic.model.path", trainer.critic.model.path, fix)


def _adapter_setting_problems(cfg: SkyRLTrainConfig, option: str, key: str, value: Any) -> Iterator[Problem]:
    section = adapter_section(cfg, key)
    if section is None:
        policy = cfg.trainer.policy
        settings = {*field_types(type(policy.model.lora)), *field_types(type(policy.optimizer_config))}
        settings -= {*OF_ALL_ADAPTERS}
        near = difflib.get_close_matches(key, settings, n=3, cutoff=0.5)
        fix = "an adapter can change settings of policy.model.lora and policy.optimizer_config; "
        choices = f"closest: {', '.join(near)}" if near else f"use one of {', '.join(sorted(settings))}"
        yield Problem(option, value, fix + choices)
        return
    try:
        converted = convert(field_types(type(section))[key], value)
    except Mismatch as mismatch:
        yield Problem(option, value, str(mismatch))
        return
    if key == "rank" and not converted:
        yield Problem(option, value, "must be at least 1; remove it to use the rank of all adapters")
