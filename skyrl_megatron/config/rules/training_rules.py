"""Rules of a training step: batch sizes, objective, optimizer, checkpoints, fully asynchronous rollouts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.config.derive import is_address, supervised
from skyrl_megatron.config.roles import active_roles, is_frozen, needs_reference, role_layout, teacher_problems
from skyrl_megatron.config.schema.algorithm import AdvantageEstimator, PolicyLossType, correction_enabled
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
    for role in ("policy", "critic"):
        if role not in roles:
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


def longest_sequence(cfg: SkyRLTrainConfig) -> int:
    """Return the tokens of the longest possible training sequence: the context of the last turn and its response. Of
    preferences: of the longest pair."""
    if (rows := supervised(cfg)) is not None:
        return rows.longest
    return (cfg.generator.max_input_length or 0) + cfg.generator.sampling_params.max_generate_length


def longest_pack(cfg: SkyRLTrainConfig) -> tuple[int, int]:
    """Return (number of longest sequences in a full training micro-batch, tokens of each)."""
    trainer, longest = cfg.trainer, longest_sequence(cfg)
    most = trainer.max_tokens_per_microbatch
    return (max(most // longest, 1) if most > 0 else trainer.micro_train_batch_size_per_gpu), longest


def _algorithm(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    estimator, loss = algorithm.advantage_estimator, algorithm.policy_loss_type
    estimators = registered("advantages", "AdvantageEstimatorRegistry", AdvantageEstimator)
    losses = registered("losses", "PolicyLossRegistry", PolicyLossType)
    if estimator not in estimators:
        fix = f"not registered; known: {', '.join(estimators)}"
        yield Problem(f"{_A}advantage_estimator", estimator, fix)
    if loss not in losses:
        yield Problem(f"{_A}policy_loss_type", loss, f"not registered; known: {', '.join(losses)}")
    yield from _critic(cfg)
    yield from _reference(cfg)
    yield from teacher_problems(cfg)
    if algorithm.use_kl_in_reward and algorithm.use_kl_loss:
        fix = "use_kl_in_reward and use_kl_loss would count the KL term twice: set one of them to false"
        yield Problem(f"{_A}use_kl_in_reward", True, fix)
    if generator.step_wise_trajectories and estimator in ("gae", "reinforce++", "rae"):
        fix = "does not work with generator.step_wise_trajectories=true: use grpo, rloo or maxrl"
        yield Problem(f"{_A}advantage_estimator", estimator, fix)
    if estimator == "gdpo" and not algorithm.gdpo_weights:
        fix = (
            "advantage_estimator=gdpo needs rewards: set metrics of the environment, such as {correct: 1, short: 0.5}"
        )
        yield Problem(f"{_A}gdpo_weights", {}, fix)
    if estimator == "rae" and cfg.trainer.policy.model.lora.adapters:
        fix = "rae has one baseline for each role, not for each adapter: use grpo or rloo"
        yield Problem(f"{_A}advantage_estimator", estimator, fix)
    sampling = algorithm.dynamic_sampling.type
    if sampling is not None and generator.n_samples_per_prompt == 1:
        fix = "with generator.n_samples_per_prompt=1 every group has zero variance: set that to at least 2"
        yield Problem(f"{_A}dynamic_sampling.type", sampling, fix)
    if generator.sampling_params.temperature == 0:
        fix = "greedy samples of a prompt are all equal, so there is nothing to learn: set it above 0"
        yield Problem("generator.sampling_params.temperature", 0.0, fix)
    elif algorithm.temperature is not None and algorithm.temperature <= 0:
        yield Problem(f"{_A}temperature", algorithm.temperature, "must be above 0")


def _critic(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Check that there is a critic if, and only if, the advantage estimator reads its values."""
    trainer, path = cfg.trainer, cfg.trainer.critic.model.path
    estimator = trainer.algorithm.advantage_estimator
    if estimator == "gae" and path is None and supervised(cfg) is None:
        yield Problem("trainer.critic.model.path", None, "advantage_estimator=gae needs a critic: set its model")
    if path is None:
        return
    if estimator != "gae" and estimator in set(AdvantageEstimator):
        fix = f"advantage_estimator={estimator} uses no critic: set that to gae, or remove this key"
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


def registered(module_name: str, registry: str, built_in: Iterable[str]) -> tuple[str, ...]:
    """Return the names in a registry. If its module is not imported, no name can have been added to ``built_in``."""
    module = sys.modules.get(f"skyrl_megatron.algorithms.{module_name}")
    if module is None:
        return tuple(built_in)
    return tuple(dict.fromkeys([*built_in, *getattr(module, registry).list_available()]))


def _anchor(algorithm: AlgorithmConfig) -> str | None:
    """Return the setting that makes the ratio of the loss relative to the engine's log-probs, None if none does."""
    loss = algorithm.policy_loss_type
    if loss == "cispo" and algorithm.cispo.anchor == "rollout":
        return "cispo.anchor"
    return "ratio_anchor" if loss in RATIO_ANCHORED and algorithm.ratio_anchor == "rollout" else None


def _correction(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    algorithm = cfg.trainer.algorithm
    correction, loss = algorithm.off_policy_correction, algorithm.policy_loss_type
    if algorithm.use_tis:  # with a cap, derive() has translated it to off_policy_correction
        fix = (
            f"needs tis_imp_ratio_cap above 0, not {algorithm.tis_imp_ratio_cap:g}; set "
            "off_policy_correction.tis_ratio_type=token instead"
        )
        yield Problem(f"{_A}use_tis", True, fix)
    if correction_enabled(correction) and loss in ("clip_cov", "kl_cov"):
        fix = f"this loss has no off-policy correction: use another loss, or remove {_A}off_policy_correction.*"
        yield Problem(f"{_A}policy_loss_type", loss, fix)
    anchored = _anchor(algorithm)
    if anchored and correction.tis_ratio_type is not None:
        fix = f"{anchored}=rollout already corrects for the engine: set one of the two back to its default"
        yield Problem(f"{_A}off_policy_correction.tis_ratio_type", correction.tis_ratio_type, fix)
    needs_them = anchored is not None or loss in ("rollout_is", "dppo", "m2po")
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


_FOLDER = "trainer.fully_async."
KEY = f"{_FOLDER}enabled"
_ANCHORED = "ratio_anchor=rollout with regular or dual_clip, or policy_loss_type=rollout_is, dppo or m2po"
RATIO_ANCHORED = ("regular", "dual_clip", "gspo", "sapo")
"""Built-in losses that read ``ratio_anchor``."""

UNCORRECTED = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy", "m2po")
"""Built-in losses without an off-policy correction."""


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
        return cfg.trainer.fully_async.rollouts_path, f"{_FOLDER}rollouts_path"
    return os.path.join(cfg.trainer.ckpt_path, "rollouts"), "trainer.ckpt_path"


def fully_async_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield the settings that contradict fully asynchronous rollouts."""
    if not generates_ahead(cfg):
        return
    if cfg.trainer.placement.colocate_all:
        fix = "engines that sample while the ranks train need separate GPUs: set it to false"
        yield Problem("trainer.placement.colocate_all", True, f"{KEY}: {fix}")
    if cfg.generator.batched:
        fix = "prompts are sampled one at a time while the policy trains: set it to false"
        yield Problem("generator.batched", True, f"{KEY}: {fix}")
    if cfg.generator.sampling_params.logprobs is None:
        fix = "responses are stale, and only their log-probabilities show by how much: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, f"{KEY}: {fix}")
    folder, setting = rollouts_folder(cfg)
    if is_address(folder):
        fix = f"{KEY}: sampled groups are stored on a file system: set {_FOLDER}rollouts_path to a folder"
        yield Problem(setting, cfg.trainer.fully_async.rollouts_path or cfg.trainer.ckpt_path, fix)
    yield from _uncorrected(cfg, KEY, "max_staleness_steps=0")


ANCHORED = "dual_clip with ratio_anchor=rollout"
STALE_POINTS = {
    ANCHORED: {1: 1, 4: -7},
    "dual_clip": {1: -9, 4: -5},
    "m2po": {1: -8, 4: -15},
    "cispo with cispo.anchor=rollout": {4: -28},
}
"""Loss → age of the samples in steps → how many points the held-out score is above that of the synchronous run, as far
as measured: ``benchmarks/learning.py losses --prompts 128 --steps 24 --lr 2e-4 --seeds 1``, ``m2po`` and ``cispo`` at
four steps with ``--lr 3e-4 --seeds 42``. Another seed may differ by three points."""


def stale_loss(cfg: SkyRLTrainConfig) -> str | None:
    """Return a warning with the figure if the loss learns worse from samples as old as those of the run, else None."""
    algorithm, ahead = cfg.trainer.algorithm, cfg.trainer.fully_async
    anchor = _anchor(algorithm)
    loss = f"{algorithm.policy_loss_type} with {anchor}=rollout" if anchor else algorithm.policy_loss_type
    if not generates_ahead(cfg):
        return None
    old = ahead.max_staleness_steps > 1 and ahead.batches_ahead != 1
    age = 4 if old else 1
    if (points := STALE_POINTS.get(loss, {}).get(age, 0)) >= -2:
        return None
    message = (
        f"trainer.algorithm.policy_loss_type={loss}: from samples {'four steps' if old else 'one step'} old it "
        f"learned worse than the synchronous run, by {-points} points in benchmarks/learning.py."
    )
    if loss != ANCHORED:
        message += f" {ANCHORED}: {STALE_POINTS[ANCHORED][age]:+d} points."
    return message + (" With trainer.fully_async.batches_ahead=1 samples are one step old." if old else "")


def oversampling_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield the settings that contradict oversampling."""
    given, key = cfg.trainer.oversampling, "trainer.oversampling.unfinished=keep"
    if not given.ratio or generates_ahead(cfg) or given.unfinished == "drop":
        return
    if given.ratio > given.max_staleness_steps:
        fix = (
            f"so many kept prompts cannot be trained in time: at most max_staleness_steps={given.max_staleness_steps}"
        )
        yield Problem("trainer.oversampling.ratio", given.ratio, fix)
    if cfg.generator.sampling_params.logprobs is None:
        fix = "continued responses are stale, and only their log-probabilities show by how much: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, f"{key}: {fix}")
    yield from _uncorrected(cfg, key, "trainer.oversampling.unfinished=drop")


def _uncorrected(cfg: SkyRLTrainConfig, key: str, otherwise: str) -> Iterator[Problem]:
    """Yield the loss if it does not correct for the stale responses that ``key`` brings."""
    if not _corrects_for_staleness(cfg):
        loss = cfg.trainer.algorithm.policy_loss_type
        fix = (
            "this loss assumes on-policy responses, but they are stale: set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token (or another part of off_policy_correction), "
            f"or a loss that reads the engine's log-probabilities ({_ANCHORED}), or {otherwise}"
        )
        if loss in UNCORRECTED:
            fix = (
                "this loss assumes on-policy responses and has no off-policy correction, but responses are stale: "
                f"set {_ANCHORED}, or policy_loss_type=regular with off_policy_correction.tis_ratio_type=token"
            )
        yield Problem("trainer.algorithm.policy_loss_type", loss, f"{key}: {fix}")


def _corrects_for_staleness(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the loss corrects for stale responses. A custom loss is taken to do so."""
    algorithm = cfg.trainer.algorithm
    loss = algorithm.policy_loss_type
    if loss not in set(PolicyLossType) or loss in ("rollout_is", "dppo", "m2po"):
        return True
    if _anchor(algorithm) is not None:
        return True
    return loss not in UNCORRECTED and correction_enabled(algorithm.off_policy_correction)
