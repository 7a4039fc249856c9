"""The check of a whole configuration before any device, process group or Ray is touched."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import default_of, get_path, owner_of
from skyrl_megatron.config.hardware import Hardware, local_hardware
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.parse.load import parse
from skyrl_megatron.config.resolve import fit_to_hardware
from skyrl_megatron.config.rules.files import file_problems
from skyrl_megatron.config.rules.placement import placement_problems
from skyrl_megatron.config.rules.role_layout import active_roles
from skyrl_megatron.config.rules.rollout import rollout_problems
from skyrl_megatron.config.rules.training import training_problems
from skyrl_megatron.config.schema.root import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.plugins import load_plugins

WITHOUT_EFFECT: Mapping[str, str] = {
    "trainer.sequence_parallel_backend": "context_parallel_size of megatron_config splits sequences",
    "trainer.policy.sequence_parallel_size": "policy.megatron_config.context_parallel_size splits sequences",
    "trainer.ref.sequence_parallel_size": "ref.megatron_config.context_parallel_size splits sequences",
    "trainer.critic.sequence_parallel_size": "critic.megatron_config.context_parallel_size splits sequences",
    "trainer.policy.megatron_config.ddp_config.average_in_collective": "gradients are summed, and divided in the loss",
    "trainer.critic.megatron_config.ddp_config.average_in_collective": "gradients are summed, and divided in the loss",
    "trainer.gradient_checkpointing_use_reentrant": "Megatron recomputes in its own way",
    "trainer.policy.model.lora.lora_sync_path": "adapters travel through memory",
    "trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable": "optimizer state always loads at any layout",
    "trainer.critic.megatron_config.dist_ckpt_optim_fully_reshardable": "optimizer state always loads at any layout",
    "generator.inference_engine.vllm_v1_disable_multiproc": "trainer.deterministic makes sampling reproducible",
    "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB": "weights travel in buckets of a fixed size",
    "generator.inference_engine.async_engine": "engines are always asynchronous",
    "generator.inference_engine.override_existing_update_group": "an old update group is always replaced",
}
"""Keys that scripts for other systems set and that change nothing here → why."""


def validate_cfg(cfg: SkyRLTrainConfig, hardware: Hardware | None = None) -> None:
    """Import plugins, fill in what depends on other fields and on the machine, warn of settings without effect, and
    check the rest.

    ``hardware``: what the run will get; None is this machine. Changes ``cfg`` in place (:mod:`.resolve`). Raises
    ConfigError with every problem, each naming key, value and fix.
    """
    problems = find_problems(cfg, hardware or local_hardware())
    if problems:
        raise ConfigError(problems)


def find_problems(cfg: SkyRLTrainConfig, hardware: Hardware) -> list[Problem]:
    """Return the problems that :func:`validate_cfg` raises; does the rest of it too."""
    try:
        load_plugins(cfg.trainer.plugins)
    except ConfigError as error:  # what they register is unknown, and would be reported too
        return list(error.problems)
    derive(cfg)
    problems = fit_to_hardware(cfg, hardware)
    _warn(cfg)
    configs, unreadable = _hf_configs(cfg)
    problems += unreadable
    problems += training_problems(cfg)
    problems += rollout_problems(cfg, configs.get("policy", {}))
    problems += placement_problems(cfg, hardware, configs)
    return list({str(problem): problem for problem in problems}.values())


def _hf_configs(cfg: SkyRLTrainConfig) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return role → ``config.json`` of its model, where it is at hand, and the problems of reading it."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    read: dict[str, dict[str, Any] | None] = {}
    for role in active_roles(cfg):
        path = getattr(cfg.trainer, role).model.path
        key = f"trainer.{role}.model.path"
        if not path:
            problems.append(Problem(key, path, "name a Hugging Face model folder or a hub model"))
            continue
        try:
            if path not in read:
                read[path] = read_hf_config(path, key)
        except ConfigError as error:
            read[path] = None
            problems += error.problems
        if (hf := read[path]) is not None:
            found[role] = hf
    return found, problems


def _warn(cfg: SkyRLTrainConfig) -> None:
    """Give one SkyRLMegatronWarning for all settings that change nothing, and one for each doubtful choice."""
    idle = [f"  {key}={get_path(cfg, key)}: {why}" for key, why in WITHOUT_EFFECT.items() if _asks_for_more(cfg, key)]
    messages = [*_doubts(cfg)]
    if idle:
        messages.insert(0, "settings without effect here:\n" + "\n".join(idle))
    for message in messages:
        warnings.warn(message, SkyRLMegatronWarning, stacklevel=4)


def _asks_for_more(cfg: SkyRLTrainConfig, key: str) -> bool:
    """Return whether a setting without effect says something else than what happens anyway."""
    section, name = owner_of(cfg, key)
    happens = True if name == "dist_ckpt_optim_fully_reshardable" else default_of(type(section), name)
    return bool(getattr(section, name) != happens)


def _doubts(cfg: SkyRLTrainConfig) -> Iterator[str]:
    generator, sampling = cfg.generator, cfg.generator.sampling_params
    if cfg.trainer.logger == "wandb" and not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ:
        yield "trainer.logger=wandb: WANDB_API_KEY is not set; the run logs to files, TensorBoard and console only"
    many_turns = generator.max_turns > 1 and generator.use_conversation_multi_turn
    if sampling.stop and many_turns and not generator.append_eos_token_after_stop_str_in_multi_turn:
        yield (
            "generator.append_eos_token_after_stop_str_in_multi_turn=False with stop strings: turns that end at a "
            "stop string carry no end-of-sequence token, so the policy is not trained to stop there"
        )


def from_command_line[C: SkyRLTrainConfig](
    cls: type[C], argv: Sequence[str], hardware: Hardware | None = None, *, training: bool = True
) -> C:
    """Parse, resolve and check the arguments of a command, files included.

    Raises ConfigError with all problems at once: those of reading, and those of the configuration that results with
    unreadable values left at their defaults.
    """
    cfg, problems = parse(cls, argv)
    unread = {problem.key for problem in problems}
    found = [*find_problems(cfg, hardware or local_hardware()), *file_problems(cfg, training)]
    problems += [problem for problem in found if problem.key not in unread]
    if problems:
        raise ConfigError(problems)
    return cfg
