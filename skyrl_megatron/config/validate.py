"""Validate a whole configuration before any device, process group or Ray is touched."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import get_path
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.resolve import fit_to_hardware, trackers
from skyrl_megatron.config.roles import active_roles
from skyrl_megatron.config.rules.ineffective import asked_for, idle_settings
from skyrl_megatron.config.rules.placement_rules import placement_problems
from skyrl_megatron.config.rules.rollout_rules import rollout_problems
from skyrl_megatron.config.rules.training_rules import fully_async_problems, training_problems
from skyrl_megatron.config.schema.run import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.plugins import load_plugins

WITHOUT_ENGINE = {
    "dots1": "vLLM has dropped its architecture Dots1ForCausalLM after 0.23",
    "solar_open": "vLLM 0.32 does not know its architecture SolarOpenForCausalLM",
}
"""Families that convert and train, but that no engine of this version runs: why."""


def require_available(cfg: SkyRLTrainConfig) -> None:
    """Raise ConfigError for a model that no engine runs."""
    key = "trainer.policy.model.path"
    path = get_path(cfg, key)
    family = ((read_hf_config(cfg) if path else None) or {}).get("model_type")
    if family in WITHOUT_ENGINE:
        fix = f"no engine runs {family}: {WITHOUT_ENGINE[family]}; take a model of another family"
        raise ConfigError([Problem(key, path, fix)])


_LORA = "trainer.policy.model.lora."
_HOW = "trainer.policy.megatron_config.lora_config."
_TOLD_ANYWAY = frozenset({f"{_LORA}lora_sync_path"})
"""What no run reads, with or without adapters: a warning says so."""


def adapter_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield a Problem where settings of adapters are asked for while ``rank=0`` trains all weights: a run would look
    like one of adapters, and be none."""
    if cfg.trainer.policy.model.lora.rank:
        return
    asked = {key: value for key, value in asked_for(cfg, (_LORA, _HOW)) if key not in _TOLD_ANYWAY}
    if asked:
        values = ", ".join(
            f"{key.removeprefix(_LORA).removeprefix('trainer.policy.megatron_config.')}={value}"
            for key, value in asked.items()
        )
        fix = f"trains all weights, but {values} {'is' if len(asked) == 1 else 'are'} set: set a rank, such as 16, "
        yield Problem(f"{_LORA}rank", 0, fix + f"or leave {'it' if len(asked) == 1 else 'them'} out")


def find_problems(cfg: SkyRLTrainConfig, hardware: Hardware) -> list[Problem]:
    """Import plugins, fill in what depends on other fields and on the machine, warn of settings without effect, and
    return what is wrong with the rest, each problem naming key, value and fix.

    ``hardware``: what the run will get. Changes ``cfg`` in place (:mod:`.resolve`). Reads no file but the models'
    ``config.json``.
    """
    try:
        load_plugins(cfg.trainer.plugins)
    except ConfigError as error:  # what they register is unknown, and would be reported too
        return list(error.problems)
    derive(cfg)
    problems = fit_to_hardware(cfg, hardware)
    _warn(cfg, hardware)
    configs, unreadable = _hf_configs(cfg)
    problems += unreadable
    problems += training_problems(cfg)
    problems += rollout_problems(cfg, configs.get("policy", {}))
    problems += adapter_problems(cfg)
    problems += fully_async_problems(cfg)
    problems += placement_problems(cfg, hardware, configs)
    return list({str(problem): problem for problem in problems}.values())


def _hf_configs(cfg: SkyRLTrainConfig) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return role → ``config.json`` of its model, where it is at hand, and the problems of reading it."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    read: dict[tuple[str, str | None], dict[str, Any] | None] = {}
    for role in active_roles(cfg):
        model = getattr(cfg.trainer, role).model
        path, key = model.path, f"trainer.{role}.model.path"
        if not path:
            problems.append(Problem(key, path, "name a Hugging Face model folder or a hub model"))
            continue
        try:
            if (path, model.revision) not in read:
                read[path, model.revision] = read_hf_config(cfg, role)
        except ConfigError as error:
            read[path, model.revision] = None
            problems += error.problems
        if (hf := read[path, model.revision]) is not None:
            found[role] = hf
    return found, problems


def _warn(cfg: SkyRLTrainConfig, hardware: Hardware) -> None:
    """Give one SkyRLMegatronWarning for all settings that change nothing, and one for each doubtful choice; to each
    configuration once."""
    messages = [*_doubts(cfg)]
    if idle := [f"  {key}={value}: {why}" for key, value, why in idle_settings(cfg, hardware)]:
        messages.insert(0, "settings without effect here:\n" + "\n".join(idle))
    told: set[str] = cfg.__dict__.setdefault("_told", set())
    for message in messages:
        if message not in told:
            told.add(message)
            warnings.warn(message, SkyRLMegatronWarning, stacklevel=4)


def _doubts(cfg: SkyRLTrainConfig) -> Iterator[str]:
    generator, sampling = cfg.generator, cfg.generator.sampling_params
    asked = [cfg.trainer.logger] if isinstance(cfg.trainer.logger, str) else cfg.trainer.logger
    if "wandb" in asked and "wandb" not in trackers(cfg):
        yield "trainer.logger=wandb: WANDB_API_KEY is not set; the run logs to files, TensorBoard and console only"
    many_turns = generator.max_turns > 1 and generator.use_conversation_multi_turn
    if sampling.stop and many_turns and not generator.append_eos_token_after_stop_str_in_multi_turn:
        yield (
            "generator.append_eos_token_after_stop_str_in_multi_turn=False with stop strings: turns that end at a "
            "stop string carry no end-of-sequence token, so the policy is not trained to stop there"
        )
