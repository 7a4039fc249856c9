"""Rules of supervised training (``skyrl-megatron sft``): what it has instead of rollouts, and what it has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.derive import preferences, reward_model, supervised
from skyrl_megatron.config.roles import ADAPTERS_KEY, has_teacher
from skyrl_megatron.config.rules.role_rules import adapter_problems
from skyrl_megatron.config.schema.algorithm import PolicyLossType
from skyrl_megatron.errors import Problem
from skyrl_megatron.plugins import SAMPLERS

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

_REWARDED = ("pools",)
"""Samplers that draw by the rewards of samples."""


def supervised_problems(cfg: SkyRLTrainConfig, models: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield every problem of rows, loss and roles. ``models``: role → the ``config.json`` of its model, if
    available."""
    rows, trainer = supervised(cfg), cfg.trainer
    if rows is None:
        return
    algorithm, adapters = trainer.algorithm, trainer.policy.model.lora.adapters
    yield from SAMPLERS.problems(cfg.data.sampler)
    yield from adapter_problems(cfg)
    if cfg.data.sampler in _REWARDED:
        yield Problem("data.sampler", cfg.data.sampler, "draws by rewards, which conversations lack: use another one")
    positions = models.get("policy", {}).get("max_position_embeddings")
    if isinstance(positions, int) and rows.max_length > positions and trainer.rope_scaling is None:
        fix = f"exceeds the model's {positions} positions: lower it, or set trainer.rope_scaling"
        yield Problem(f"{rows.SECTION}.max_length", rows.max_length, fix)
    if algorithm.policy_loss_type in set(PolicyLossType) - {PolicyLossType.CROSS_ENTROPY}:
        fix = "this loss needs advantages, which conversations lack: remove this key"
        yield Problem("trainer.algorithm.policy_loss_type", algorithm.policy_loss_type, fix)
    if reward_model(cfg) is not None and rows.long_rows == "truncate":
        yield Problem(f"{rows.SECTION}.long_rows", "truncate", "an answer without its end has no score: use skip")
    if preferences(cfg) is not None:
        if algorithm.use_kl_loss:
            fix = "the loss of preferences has its own KL term: remove this key, and set dpo.beta"
            yield Problem("trainer.algorithm.use_kl_loss", True, fix)
        if trainer.update_ref_every_epoch:
            fix = "the reference of preferences is fixed: remove this key"
            yield Problem("trainer.update_ref_every_epoch", True, fix)
    if reward_model(cfg) is not None:
        for option, setting in (
            ("trainer.algorithm.use_kl_loss", algorithm.use_kl_loss),
            ("trainer.policy.model.lora.rank", trainer.policy.model.lora.rank),
            ("trainer.policy.megatron_config.mtp.train", trainer.policy.megatron_config.mtp.train),
        ):
            if setting:
                yield Problem(
                    option, setting, "a reward model trains all weights and has no log-probs: remove this key"
                )
    if len(adapters) > 1:
        yield Problem(ADAPTERS_KEY, ", ".join(adapters), "supervised training trains one adapter per run: name one")
    for key, value, unwanted in (
        ("data.eval_sets", ", ".join(cfg.data.eval_sets), bool(cfg.data.eval_sets)),
        ("trainer.critic.model.path", trainer.critic.model.path, trainer.critic.model.path is not None),
        ("trainer.teacher.model.path", trainer.teacher.model.path, has_teacher(cfg)),
        ("trainer.algorithm.use_kl_in_reward", True, algorithm.use_kl_in_reward),
        ("trainer.fully_async.enabled", True, trainer.fully_async.enabled),
        ("trainer.exact_rollouts", True, trainer.exact_rollouts),
        ("trainer.max_rollout_gap", trainer.max_rollout_gap, trainer.max_rollout_gap is not None),
        ("generator.n_samples_per_prompt", cfg.generator.n_samples_per_prompt, cfg.generator.n_samples_per_prompt > 1),
        ("generator.inference_engine.run_engines_locally", True, cfg.generator.inference_engine.run_engines_locally),
    ):
        if unwanted:
            yield Problem(key, value, "supervised training has no rewards, samples or engines: remove this key")
