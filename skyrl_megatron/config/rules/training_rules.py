"""Rules of a training step: batch sizes, objective, optimizer, checkpoints, fully asynchronous rollouts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.derive import is_address, supervised
from skyrl_megatron.config.fields import get_path
from skyrl_megatron.config.resolve import FULLY_ASYNC, generates_ahead, longest_sequence, rollouts_folder
from skyrl_megatron.config.roles import active_roles, is_frozen, needs_reference, role_layout
from skyrl_megatron.config.rules.role_rules import teacher_problems
from skyrl_megatron.config.schema.algorithm import OffPolicyCorrectionConfig, correction_enabled
from skyrl_megatron.config.table import ESTIMATORS, LOSSES, ObjectiveRow, ObjectiveTable, one_of
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_A = "trainer.algorithm."

LONGEST_NAME = 255
"""Maximum number of bytes of a file name on Linux."""


def training_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield every problem of batches, objective, optimizer and checkpoints."""
    yield from _batch(cfg)
    yield from _algorithm(cfg)
    yield from _correction(cfg)
    yield from _limits(cfg.trainer.algorithm)
    yield from _optimizers(cfg)
    yield from _checkpoints(cfg)
    endpoint = cfg.trainer.opentelemetry_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Problem("trainer.opentelemetry_endpoint", endpoint, "give an address such as http://127.0.0.1:4318")


def _batch(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    trainer, n = cfg.trainer, cfg.generator.n_samples_per_prompt
    train, roles = trainer.train_batch_size, active_roles(cfg)
    for role in roles:
        if is_frozen(role):
            continue
        key = f"trainer.{role}_mini_batch_size"
        mini: int = getattr(trainer, f"{role}_mini_batch_size")
        if mini > train:
            yield Problem(key, mini, f"must be at most trainer.train_batch_size={train}")
        elif train % mini:
            yield Problem(key, mini, f"must divide trainer.train_batch_size={train}")
        dp = role_layout(cfg, role).dp
        if dp < 1:
            continue  # an invalid layout, which the layout rules report
        micro = trainer.micro_train_batch_size_per_gpu
        sizes = f"{mini} prompts · {n} samples = {mini * n} sequences per optimizer step"
        if (mini * n) % dp:
            yield Problem(key, mini, f"{sizes} must be a multiple of the {role}'s dp={dp}")
        elif trainer.max_tokens_per_microbatch < 0 and (mini * n // dp) % micro:
            fix = f"must divide the {mini * n // dp} sequences of a data-parallel rank ({sizes}, dp={dp})"
            yield Problem("trainer.micro_train_batch_size_per_gpu", micro, fix)
    needed = math.lcm(*(max(role_layout(cfg, role).dp, 1) for role in roles))
    if train * n < needed:
        fix = (
            f"train_batch_size · n_samples_per_prompt={n} must be at least {needed}, the least common multiple of the "
            "dp of all roles"
        )
        yield Problem("trainer.train_batch_size", train, fix)
    budget, longest = trainer.max_tokens_per_microbatch, longest_sequence(cfg)
    if 0 < budget < longest:
        rows = supervised(cfg)
        parts = "max_input_length + max_generate_length" if rows is None else f"{rows.SECTION}.max_length"
        what = "sequence" if rows is None or rows.longest == rows.max_length else "pair"
        fix = f"must be at least {longest} tokens, the longest {what} ({parts})"
        yield Problem("trainer.max_tokens_per_microbatch", budget, fix)


def _algorithm(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    yield from _objective(cfg, LOSSES, algorithm.policy_loss_type, "PolicyLossRegistry")
    yield from _objective(cfg, ESTIMATORS, algorithm.advantage_estimator, "AdvantageEstimatorRegistry")
    yield from _critic(cfg)
    yield from _reference(cfg)
    yield from teacher_problems(cfg)
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        fix = "use_kl_in_reward and use_kl_loss would count the KL term twice: set one of them to false"
        yield Problem(f"{_A}use_kl_in_reward", True, fix)
    sampling = algorithm.dynamic_sampling.type
    if sampling is not None and generator.n_samples_per_prompt == 1:
        fix = "with generator.n_samples_per_prompt=1 every group has zero variance: set that to at least 2"
        yield Problem(f"{_A}dynamic_sampling.type", sampling, fix)
    if generator.sampling_params.temperature == 0:
        fix = "greedy samples of a prompt are all equal, so there is nothing to learn: set it above 0"
        yield Problem("generator.sampling_params.temperature", 0.0, fix)
    elif algorithm.temperature is not None and algorithm.temperature <= 0:
        yield Problem(f"{_A}temperature", algorithm.temperature, "must be above 0")


def _objective[R: ObjectiveRow](
    cfg: SkyRLTrainConfig, table: ObjectiveTable[R], name: str, registry: str
) -> Iterator[Problem]:
    """Check that a loss or an estimator is there, and that nothing is set that its row refuses."""
    if name not in _registered(table, registry):
        table.find(name)  # its row may be in the module of its function, which is not imported yet
    if name not in (names := _registered(table, registry)):
        fix = f"not registered: choose one of {', '.join(names)}, or name its module in trainer.plugins"
        yield Problem(table.key, name, fix)
    if (row := table.get(name)) is None:
        return
    for key, fix in row.refuses.items():
        if _is_on(get_path(cfg, key)):
            yield Problem(table.key, name, fix)
    for key, fix in getattr(row, "needs", {}).items():
        if not (value := get_path(cfg, _A + key)):
            yield Problem(_A + key, value, fix)


def _registered[R: ObjectiveRow](table: ObjectiveTable[R], registry: str) -> tuple[str, ...]:
    """Return the names in a registry. If its module is not imported, no name can have been added to the table's."""
    module = sys.modules.get(table.home)
    added = () if module is None else getattr(module, registry).list_available()
    return tuple(dict.fromkeys([*table.rows, *added]))


def _is_on(value: Any) -> bool:
    return correction_enabled(value) if isinstance(value, OffPolicyCorrectionConfig) else bool(value)


def _critic(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Check that there is a critic if, and only if, the advantage estimator reads its values."""
    trainer, path = cfg.trainer, cfg.trainer.critic.model.path
    estimator = trainer.algorithm.advantage_estimator
    row = ESTIMATORS.get(estimator)
    if row is not None and row.critic and path is None and supervised(cfg) is None:
        fix = f"advantage_estimator={estimator} needs a critic: set its model"
        yield Problem("trainer.critic.model.path", None, fix)
    if path is None:
        return
    if row is not None and row.critic is False:
        with_critic = one_of(name for name, other in ESTIMATORS.rows.items() if other.critic)
        fix = f"advantage_estimator={estimator} uses no critic: set that to {with_critic}, or remove this key"
        yield Problem("trainer.critic.model.path", path, fix)
    steps, last = trainer.critic_warmup_steps, trainer.max_training_steps
    if last is not None and steps >= last:
        yield Problem(
            "trainer.critic_warmup_steps",
            steps,
            f"must be below max_training_steps={last}, else the policy never trains",
        )


def _reference(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Check that a reference that is updated from the policy has the policy's model."""
    key, trainer = "trainer.update_ref_every_epoch", cfg.trainer
    if not trainer.update_ref_every_epoch or not needs_reference(cfg):
        return
    if trainer.policy.model.lora.rank > 0:
        fix = "with adapters the reference is always the base model: set it to false"
        yield Problem(key, True, fix)
    elif trainer.ref.model.path not in (None, trainer.policy.model.path):
        fix = f"the reference becomes a copy of the policy: remove trainer.ref.model.path={trainer.ref.model.path}"
        yield Problem(key, True, fix)


def _anchor(algorithm: AlgorithmConfig) -> str | None:
    """Return the setting that makes the ratio of the loss relative to the engine's log-probs, None if none does."""
    row = LOSSES.get(algorithm.policy_loss_type)
    return row.anchor if row is not None and row.is_anchored(algorithm) else None


def _correction(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    algorithm = cfg.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    if algorithm.use_tis:  # with a cap, derive() has translated it to off_policy_correction
        fix = (
            f"needs tis_imp_ratio_cap above 0, not {algorithm.tis_imp_ratio_cap:g}; set "
            "off_policy_correction.tis_ratio_type=token instead"
        )
        yield Problem(f"{_A}use_tis", True, fix)
    anchored = _anchor(algorithm)
    if anchored and correction.tis_ratio_type is not None:
        fix = f"{anchored}=rollout already corrects for the engine: set one of the two back to its default"
        yield Problem(f"{_A}off_policy_correction.tis_ratio_type", correction.tis_ratio_type, fix)
    row = LOSSES.get(loss)
    needs_them = anchored is not None or (row is not None and row.reads_rollout)
    if cfg.generator.sampling_params.logprobs is None and needs_them:
        fix = f"policy_loss_type={loss} needs the engine's log-probabilities: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, fix)


def _limits(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Check that each lower limit is below its upper limit."""
    correction, covariance = algorithm.off_policy_correction, algorithm.clip_cov
    if correction.sequence_error_high is not None and correction.sequence_error_high <= 1:
        fix = "the mean of exp(|log r|) is never below 1: set it above 1, such as 2"
        yield Problem(f"{_A}off_policy_correction.sequence_error_high", correction.sequence_error_high, fix)
    pairs = [("off_policy_correction.geo_mask", correction.geo_mask_low, correction.geo_mask_high)]
    pairs.append(("off_policy_correction.product_mask", correction.product_mask_low, correction.product_mask_high))
    for name in ("outlier_token_is_threshold", "token_mask_is_threshold"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if low is not None and high is not None:
            pairs.append((f"off_policy_correction.{name}", low, high))
    for key, low, high in pairs:
        if low >= high:
            yield Problem(f"{_A}{key}_low", low, f"must be below {key.rpartition('.')[2]}_high={high}")
    if covariance.clip_cov_lb >= covariance.clip_cov_ub:
        fix = f"must be below clip_cov_ub={covariance.clip_cov_ub}"
        yield Problem(f"{_A}clip_cov.clip_cov_lb", covariance.clip_cov_lb, fix)


def _optimizers(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    for role in active_roles(cfg):
        if is_frozen(role):
            continue
        section = f"trainer.{role}.optimizer_config"
        optimizer = getattr(cfg.trainer, role).optimizer_config
        betas = optimizer.adam_betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield Problem(f"{section}.adam_betas", betas, "must be two numbers, each at least 0 and below 1")
        if optimizer.min_lr > optimizer.lr:
            yield Problem(f"{section}.min_lr", optimizer.min_lr, f"must be at most lr={optimizer.lr}")
        if optimizer.optimizer == "muon" and optimizer.adam_lr and not optimizer.lr:
            fix = "is a ratio to the schedule's rate, which is 0: set lr too, or remove this key"
            yield Problem(f"{section}.adam_lr", optimizer.adam_lr, fix)
        decay, warmup = optimizer.num_decay_steps, optimizer.num_warmup_steps
        if decay is not None and decay <= warmup:
            yield Problem(f"{section}.num_decay_steps", decay, f"must exceed num_warmup_steps={warmup}")


def _checkpoints(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    trainer = cfg.trainer
    if trainer.resume_mode == "from_path":
        if not trainer.resume_path:
            fix = "resume_mode=from_path needs a checkpoint: set it to a global_step_N folder"
            yield Problem("trainer.resume_path", None, fix)
    elif trainer.resume_path:
        fix = f"has no effect with resume_mode={trainer.resume_mode}: set resume_mode=from_path, or remove this key"
        yield Problem("trainer.resume_path", trainer.resume_path, fix)
    for name in ("project_name", "run_name"):
        value: str = getattr(trainer, name)
        if not value or value in (".", "..") or os.sep in value:
            yield Problem(f"trainer.{name}", value, "names a log folder: use letters, digits, '-' and '_'")
        elif len(value.encode()) > LONGEST_NAME:
            yield Problem(f"trainer.{name}", value, f"names a log folder: use at most {LONGEST_NAME} bytes")


_ENABLED = f"{FULLY_ASYNC}.enabled"


def fully_async_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield the settings that contradict fully asynchronous rollouts."""
    if not generates_ahead(cfg):
        return
    if cfg.trainer.placement.colocate_all:
        fix = "engines that sample while the ranks train need separate GPUs: set it to false"
        yield Problem("trainer.placement.colocate_all", True, f"{_ENABLED}: {fix}")
    if cfg.generator.batched:
        fix = "prompts are sampled one at a time while the policy trains: set it to false"
        yield Problem("generator.batched", True, f"{_ENABLED}: {fix}")
    if cfg.generator.sampling_params.logprobs is None:
        fix = "responses are stale, and only their log-probabilities show by how much: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, f"{_ENABLED}: {fix}")
    folder, setting = rollouts_folder(cfg)
    if is_address(folder):
        fix = f"{_ENABLED}: sampled groups are stored on a file system: set {FULLY_ASYNC}.rollouts_path to a folder"
        yield Problem(setting, cfg.trainer.fully_async.rollouts_path or cfg.trainer.ckpt_path, fix)
    yield from _uncorrected(cfg, _ENABLED, "max_staleness_steps=0")


def oversampling_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield the settings that contradict oversampling."""
    oversampling, key = cfg.trainer.oversampling, "trainer.oversampling.unfinished=keep"
    if not oversampling.ratio or generates_ahead(cfg) or oversampling.unfinished == "drop":
        return
    if oversampling.ratio > oversampling.max_staleness_steps:
        fix = (
            "so many kept prompts cannot be trained in time: lower it to at most "
            f"max_staleness_steps={oversampling.max_staleness_steps}"
        )
        yield Problem("trainer.oversampling.ratio", oversampling.ratio, fix)
    if cfg.generator.sampling_params.logprobs is None:
        fix = "continued responses are stale, and only their log-probabilities show by how much: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, f"{key}: {fix}")
    yield from _uncorrected(cfg, key, "trainer.oversampling.unfinished=drop")


def _uncorrected(cfg: SkyRLTrainConfig, key: str, otherwise: str) -> Iterator[Problem]:
    """Yield the loss if it does not correct for the stale responses that ``key`` brings."""
    algorithm = cfg.trainer.algorithm
    if _corrects_for_staleness(algorithm):
        return
    loss, row = algorithm.policy_loss_type, LOSSES[algorithm.policy_loss_type]
    anchored = one_of(name for name, other in LOSSES.rows.items() if other.anchor == "ratio_anchor")
    reading = one_of(name for name, other in LOSSES.rows.items() if other.reads_rollout)
    others = f"ratio_anchor=rollout with {anchored}, or policy_loss_type={reading}"
    fix = (
        "this loss assumes on-policy responses, but they are stale: set "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token (or another part of off_policy_correction), "
        f"or a loss that reads the engine's log-probabilities ({others}), or {otherwise}"
    )
    if row.corrected is False:
        fix = (
            "this loss assumes on-policy responses and has no off-policy correction, but responses are stale: "
            f"set {others}, or policy_loss_type=regular with off_policy_correction.tis_ratio_type=token"
        )
    yield Problem("trainer.algorithm.policy_loss_type", loss, f"{key}: {fix}")


def _corrects_for_staleness(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss corrects for stale responses. A loss is taken to do so unless its row says otherwise."""
    row = LOSSES.get(algorithm.policy_loss_type)
    if row is None or row.corrected is None or row.reads_rollout or row.is_anchored(algorithm):
        return True
    return row.corrected and correction_enabled(algorithm.off_policy_correction)
