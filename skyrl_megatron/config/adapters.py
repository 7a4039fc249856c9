"""Several low-rank adapters on one base: what each of them is configured as, by its name.

An adapter is configured as a run that trains it alone would be, and that is how everything below reads it: the engine,
the checks and the memory plan ask for the configuration of each.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import Section, field_types
from skyrl_megatron.config.parse.values import Mismatch, convert
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

KEY = "trainer.policy.model.lora.adapters"
ADAPTER_KEY = "adapter"
"""Column of a data row that says which adapter it belongs to."""
_OF_ALL = ("adapters", "sync_mode", "lora_sync_path", "offload_after_step")
"""What cannot differ between adapters of a run."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def adapter_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names of the policy's adapters; ``("",)`` where there is one without a name, or none."""
    return tuple(cfg.trainer.policy.model.lora.adapters) or ("",)


def role_part(role: str, adapter: str) -> str:
    """Return where a checkpoint has what is trained of a role: ``policy``, or ``policy/math`` of a named adapter."""
    return f"{role}/{adapter}" if adapter else role


def adapter_configs(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → the configuration of a run that trains this adapter alone; ``{"": cfg}`` without names.

    Sections that no adapter changes are those of ``cfg`` itself.
    """
    own = cfg.trainer.policy.model.lora.adapters
    return {name: _alone(cfg, changes or {}) for name, changes in own.items()} or {"": cfg}


def _alone(cfg: SkyRLTrainConfig, changes: dict[str, Any]) -> SkyRLTrainConfig:
    cfg = copy.copy(cfg)
    cfg.trainer = copy.copy(cfg.trainer)
    policy = cfg.trainer.policy = copy.copy(cfg.trainer.policy)
    policy.model, policy.optimizer_config = copy.copy(policy.model), copy.copy(policy.optimizer_config)
    policy.model.lora = copy.copy(policy.model.lora)
    policy.model.lora.adapters = {}
    for key, value in changes.items():
        section = _section(cfg, key)
        assert section is not None, key
        setattr(section, key, convert(field_types(type(section))[key], value))
    return cfg


def _section(cfg: SkyRLTrainConfig, key: str) -> Section | None:
    """Return the section that an adapter's setting changes; None where there is none."""
    policy = cfg.trainer.policy
    sections: tuple[Section, ...] = (policy.model.lora, policy.optimizer_config)
    return next((each for each in sections if key in field_types(type(each)) and key not in _OF_ALL), None)


def adapter_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield everything wrong with the names and settings of several adapters."""
    lora, trainer = cfg.trainer.policy.model.lora, cfg.trainer
    if not lora.adapters:
        return
    if not lora.rank:
        yield Problem(KEY, ", ".join(lora.adapters), "adapters are off: set trainer.policy.model.lora.rank")
    for name, changes in lora.adapters.items():
        if not _NAME.fullmatch(name):
            yield Problem(KEY, name, "a name is made of letters, digits, _ and -: it names folders and requests")
        for key, value in (changes or {}).items():
            yield from _setting(cfg, f"{KEY}.{name}.{key}", key, value)
    if len(lora.adapters) > 1 and trainer.algorithm.use_kl_in_reward and trainer.algorithm.kl_ctrl.type == "adaptive":
        fix = "one coefficient would follow all adapters together: use fixed, or train them one by one"
        yield Problem("trainer.algorithm.kl_ctrl.type", "adaptive", fix)
    if len(lora.adapters) > 1 and trainer.critic.model.path is not None:
        fix = "one critic would learn from the rows of all adapters: take an estimator without one"
        yield Problem("trainer.critic.model.path", trainer.critic.model.path, fix)


def _setting(cfg: SkyRLTrainConfig, place: str, key: str, value: Any) -> Iterator[Problem]:
    section = _section(cfg, key)
    if section is None:
        policy = cfg.trainer.policy
        known = {*field_types(type(policy.model.lora)), *field_types(type(policy.optimizer_config))} - {*_OF_ALL}
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        fix = "an adapter has settings of policy.model.lora and policy.optimizer_config of its own; "
        yield Problem(place, value, fix + f"{'nearest' if near else 'there are'}: {', '.join(near or sorted(known))}")
        return
    try:
        converted = convert(field_types(type(section))[key], value)
    except Mismatch as mismatch:
        yield Problem(place, value, str(mismatch))
        return
    if key == "rank" and not converted:
        yield Problem(place, value, "an adapter has at least rank 1: leave it out to take that of all")
