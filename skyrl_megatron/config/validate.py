"""Validate a whole configuration before the run uses a device, a process group or Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyrl_megatron.config.derive import derive, supervised
from skyrl_megatron.config.fields import get_path
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.resolve import fit_to_hardware, trackers
from skyrl_megatron.config.roles import active_roles, is_frozen
from skyrl_megatron.config.rules.evaluation_rules import evaluation_problems
from skyrl_megatron.config.rules.exact_rules import exact_problems
from skyrl_megatron.config.rules.ineffective import explicit_settings, ineffective_settings
from skyrl_megatron.config.rules.placement_rules import missing_gpus, placement_problems
from skyrl_megatron.config.rules.rollout_rules import rollout_problems, unaccounted_sampling
from skyrl_megatron.config.rules.training_rules import (
    fully_async_problems,
    oversampling_problems,
    training_problems,
)
from skyrl_megatron.config.schema.run import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.plugins import OPTIMIZERS, RULES, TRACKERS, load_plugins

FAMILIES_WITHOUT_ENGINE = {
    "dots1": "vLLM removed its architecture Dots1ForCausalLM after version 0.23",
    "solar_open": "vLLM 0.32 does not support its architecture SolarOpenForCausalLM",
}
"""Model families that can be converted and trained, but that the installed vLLM cannot run → reason."""


def require_available(cfg: SkyRLTrainConfig) -> None:
    """Raise ConfigError if the run samples and no engine can run the policy's model."""
    if supervised(cfg) is not None:
        return
    key = "trainer.policy.model.path"
    path = get_path(cfg, key)
    family = ((read_hf_config(cfg) if path else None) or {}).get("model_type")
    if family in FAMILIES_WITHOUT_ENGINE:
        fix = f"no engine runs {family}: {FAMILIES_WITHOUT_ENGINE[family]}; use a model of another family"
        raise ConfigError([Problem(key, path, fix)])


_LORA = "trainer.policy.model.lora."
_HOW = "trainer.policy.megatron_config.lora_config."
_NEVER_READ = frozenset({f"{_LORA}lora_sync_path"})
"""Keys that no run reads. The warning of ineffective settings reports them."""


def adapter_problems(cfg: SkyRLTrainConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a Problem if adapter settings are explicit while ``rank=0``, with which the run has no adapters, and one
    if frozen weights cannot do what is asked. ``hf``: the policy's ``config.json``, or empty."""
    if cfg.trainer.policy.model.lora.rank:
        moves = cfg.trainer.policy.megatron_config.moe_expert_moves
        if moves != "none" and hf.get("quantization_config"):
            fix = "moves no weights in 8 bits: set it to none, or use a folder of the model in bfloat16"
            yield Problem("trainer.policy.megatron_config.moe_expert_moves", moves, fix)
        return
    explicit = {key: value for key, value in explicit_settings(cfg, (_LORA, _HOW)) if key not in _NEVER_READ}
    if explicit:
        values = ", ".join(
            f"{key.removeprefix(_LORA).removeprefix('trainer.policy.megatron_config.')}={value}"
            for key, value in explicit.items()
        )
        verb, keys = ("is", "that key") if len(explicit) == 1 else ("are", "those keys")
        fix = f"rank=0 trains all weights, but {values} {verb} set: set a rank, such as 16, or remove {keys}"
        yield Problem(f"{_LORA}rank", 0, fix)


def find_problems(cfg: SkyRLTrainConfig, hardware: Hardware, *, training: bool = True) -> list[Problem]:
    """Resolve ``cfg`` in place, and return every problem of it; each names key, value and fix.

    Imports plugins, fills in the fields that depend on others and on the machine (:mod:`.resolve`), and warns of
    settings without effect. ``hardware``: what the run will get. ``training``: whether it trains. Reads no file except
    the models' ``config.json``.
    """
    try:
        load_plugins(cfg.trainer.plugins)
    except ConfigError as error:  # without the plugins, the names that they register would be reported too
        return list(error.problems)
    derive(cfg)
    if without := list(missing_gpus(cfg, hardware)):  # rules of a CPU run would hide it
        return without
    problems = fit_to_hardware(cfg, hardware)
    configs, unreadable = _hf_configs(cfg)
    outcomes = [outcome for rule in RULES.all() for outcome in rule(cfg, configs)]
    _warn(cfg, hardware, [outcome for outcome in outcomes if isinstance(outcome, str)])
    problems += unreadable
    problems += [problem for name in trackers(cfg) for problem in TRACKERS.problems(name)]
    problems += [
        replace(problem, key=f"trainer.{role}.{problem.key}")
        for role in active_roles(cfg)
        if not is_frozen(role)
        for problem in OPTIMIZERS.problems(getattr(cfg.trainer, role).optimizer_config.optimizer)
    ]
    problems += training_problems(cfg)
    policy = configs.get("policy", {})
    problems += evaluation_problems(cfg)
    if supervised(cfg) is None:
        problems += rollout_problems(cfg, policy, hardware, training=training)
        problems += exact_problems(cfg, hardware, policy)
    problems += [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    problems += adapter_problems(cfg, policy)
    problems += fully_async_problems(cfg)
    problems += oversampling_problems(cfg)
    problems += placement_problems(cfg, hardware, configs)
    return list({str(problem): problem for problem in problems}.values())


def _hf_configs(cfg: SkyRLTrainConfig) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return role → ``config.json`` of its model, for those available, and the problems of reading them."""
    configs: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    read: dict[tuple[str, str | None], dict[str, Any] | None] = {}
    for role in active_roles(cfg):
        model = getattr(cfg.trainer, role).model
        path, key = model.path, f"trainer.{role}.model.path"
        if not path:
            problems.append(Problem(key, path, "set it to a Hugging Face model folder, or to the name of a hub model"))
            continue
        try:
            if (path, model.revision) not in read:
                read[path, model.revision] = read_hf_config(cfg, role)
        except ConfigError as error:
            read[path, model.revision] = None
            problems += error.problems
        if (hf := read[path, model.revision]) is not None:
            configs[role] = hf
    return configs, problems


def _warn(cfg: SkyRLTrainConfig, hardware: Hardware, notes: Sequence[str]) -> None:
    """Issue one SkyRLMegatronWarning for all settings without effect, and one for each questionable choice, such as
    the ``notes`` of registered rules. A configuration gets each message once."""
    messages = [*_questionable(cfg), *notes]
    if lines := [f"  {key}={value}: {why}" for key, value, why in ineffective_settings(cfg, hardware)]:
        messages.insert(0, "settings without effect in this run:\n" + "\n".join(lines))
    issued: set[str] = cfg.__dict__.setdefault("_warned", set())
    for message in messages:
        if message not in issued:
            issued.add(message)
            warnings.warn(message, SkyRLMegatronWarning, stacklevel=4)


def _questionable(cfg: SkyRLTrainConfig) -> Iterator[str]:
    generator, sampling = cfg.generator, cfg.generator.sampling_params
    loggers = [cfg.trainer.logger] if isinstance(cfg.trainer.logger, str) else cfg.trainer.logger
    if "wandb" in loggers and "wandb" not in trackers(cfg):
        yield "trainer.logger=wandb: WANDB_API_KEY is not set; the run logs to files, TensorBoard and console only"
    many_turns = generator.max_turns > 1 and generator.use_conversation_multi_turn
    if supervised(cfg) is None and generator.unaccounted_sampling == "warn" and (problem := unaccounted_sampling(cfg)):
        yield str(problem)
    if sampling.stop and many_turns and not generator.append_eos_token_after_stop_str_in_multi_turn:
        yield (
            "generator.append_eos_token_after_stop_str_in_multi_turn=False with stop strings: turns that end at a "
            "stop string have no end-of-sequence token, so the policy is not trained to stop there"
        )
