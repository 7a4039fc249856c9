"""The teachers of a run by name: those on ranks with the configuration of each, and those behind an address."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.config.paths import is_address
from skyrl_megatron.config.rules.role_layout import active_roles, has_teacher
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_A, KEY = "trainer.algorithm.", "trainer.teacher.models"


def teacher_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names, the first of which judges rows that name none; ``("",)`` of one without a name, () of none."""
    return tuple(cfg.trainer.teacher.models) or (("",) if has_teacher(cfg) else ())


def teacher_addresses(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return name → address of the teachers that are served elsewhere."""
    return {name: model for name, model in cfg.trainer.teacher.models.items() if is_address(model)}


def teachers_on_ranks(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → the configuration of a run that has this teacher alone, as its ranks read it."""
    elsewhere = teacher_addresses(cfg)
    return {name: _alone(cfg, name) for name in teacher_names(cfg) if name not in elsewhere}


def _alone(cfg: SkyRLTrainConfig, name: str) -> SkyRLTrainConfig:
    if not name:
        return cfg
    path = cfg.trainer.teacher.models[name]
    cfg = copy.copy(cfg)
    cfg.trainer = copy.copy(cfg.trainer)
    teacher = cfg.trainer.teacher = copy.copy(cfg.trainer.teacher)
    teacher.model, teacher.models = copy.copy(teacher.model), {}
    teacher.model.path = path
    return cfg


def role_key(name: str) -> str:
    """Return what a teacher on ranks is called among the roles of a run."""
    return f"teacher/{name}" if name else "teacher"


def role_configs(cfg: SkyRLTrainConfig) -> dict[str, tuple[str, SkyRLTrainConfig]]:
    """Return what a run starts on ranks, by its key: its role, and the configuration that its ranks read."""
    found: dict[str, tuple[str, SkyRLTrainConfig]] = {}
    for role in active_roles(cfg):
        if role == "teacher":
            found |= {role_key(name): (role, own) for name, own in teachers_on_ranks(cfg).items()}
        else:
            found[role] = (role, cfg)
    return found


def teacher_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what is wrong between teachers and what is to be learned from them."""
    algorithm, teacher = cfg.trainer.algorithm, cfg.trainer.teacher
    wanted = algorithm.distillation
    if not has_teacher(cfg):
        if algorithm.advantage_estimator == "distillation" or wanted.reward_coef or wanted.loss_coef:
            fix = "distillation needs a teacher: name its model, or trainer.teacher.models"
            yield Problem("trainer.teacher.model.path", None, fix)
        return
    if teacher.models and teacher.model.path not in (None, *teacher.models.values()):
        yield Problem("trainer.teacher.model.path", teacher.model.path, f"is none of {KEY}: name each of them there")
    for name in teacher.models:
        if not _NAME.fullmatch(name):
            yield Problem(KEY, name, "a name is made of letters, digits, _ and -")
    if not wanted.reward_coef and not wanted.loss_coef:
        fix = "nothing is learned from it: set distillation.reward_coef or .loss_coef, or the estimator distillation"
        key, value = (KEY, teacher.models) if teacher.models else ("trainer.teacher.model.path", teacher.model.path)
        yield Problem(key, value, fix)
    if wanted.divergence_alone and not wanted.loss_coef:
        fix = "the divergence is the whole loss, and has weight 0: set distillation.loss_coef"
        yield Problem(f"{_A}distillation.divergence_alone", True, fix)
    if wanted.loss_coef and cfg.trainer.fused_lm_head_logprob:
        yield Problem("trainer.fused_lm_head_logprob", True, "distillation.loss_coef reads logits: set it to false")
    if cfg.generator.step_wise_trajectories and algorithm.advantage_estimator == "distillation":
        fix = "does not work with generator.step_wise_trajectories=true: use grpo, rloo or maxrl"
        yield Problem(f"{_A}advantage_estimator", "distillation", fix)
    for name, address in teacher_addresses(cfg).items():
        if algorithm.temperature not in (None, 1.0):
            fix = f"the engine at {address} gives log-probs at temperature 1: set it to 1, or put {name} on ranks"
            yield Problem("generator.sampling_params.temperature", algorithm.temperature, fix)
