"""Rules of rollouts that run ahead of training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_megatron.config.names import PolicyLossType
from skyrl_megatron.config.paths import is_address
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

_FOLDER = "trainer.fully_async."
KEY = f"{_FOLDER}enabled"
_ANCHORED = "policy_loss_type=rollout_is or dppo, cispo with cispo.anchor=rollout"

UNCORRECTED = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy")
"""Built-in losses without an off-policy correction."""


def runs_ahead(cfg: SkyRLTrainConfig) -> bool:
    """Return whether responses may be sampled while the policy trains, and lag behind it."""
    return cfg.trainer.fully_async.enabled and cfg.trainer.fully_async.max_staleness_steps > 0


def samples_repeatably(cfg: SkyRLTrainConfig) -> bool:
    """Return whether two runs sample the same: where responses run ahead, time decides which weights sample them."""
    return bool(cfg.trainer.deterministic) and not runs_ahead(cfg)


def rollouts_folder(cfg: SkyRLTrainConfig) -> tuple[str, str]:
    """Return (folder of the groups that were sampled, key that chooses it)."""
    if cfg.trainer.fully_async.rollouts_path:
        return cfg.trainer.fully_async.rollouts_path, f"{_FOLDER}rollouts_path"
    return os.path.join(cfg.trainer.ckpt_path, "rollouts"), "trainer.ckpt_path"


def fully_async_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what does not go together with rollouts that run ahead."""
    if not runs_ahead(cfg):
        return
    if cfg.trainer.placement.colocate_all:
        fix = "engines that sample while the ranks train need GPUs of their own: set it to false"
        yield Problem("trainer.placement.colocate_all", True, f"{KEY}: {fix}")
    if cfg.generator.batched:
        fix = "prompts are sampled one by one while the policy trains: set it to false"
        yield Problem("generator.batched", True, f"{KEY}: {fix}")
    if cfg.generator.sampling_params.logprobs is None:
        fix = "responses lag behind the policy, which only their log-probabilities tell: set it to 1"
        yield Problem("generator.sampling_params.logprobs", None, f"{KEY}: {fix}")
    folder, setting = rollouts_folder(cfg)
    if is_address(folder):
        fix = f"{KEY}: what is sampled is kept on a file system: set {_FOLDER}rollouts_path to a folder"
        yield Problem(setting, cfg.trainer.fully_async.rollouts_path or cfg.trainer.ckpt_path, fix)
    if not _knows_the_sampler(cfg):
        loss = cfg.trainer.algorithm.policy_loss_type
        fix = (
            "takes responses for those of the policy, and they lag behind it: set "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token (or another part of off_policy_correction), "
            f"or a loss that reads the engine's log-probabilities ({_ANCHORED}), or max_staleness_steps=0"
        )
        if loss in UNCORRECTED:
            fix = (
                "takes responses for those of the policy, they lag behind it, and it has no off-policy correction: "
                f"set {_ANCHORED}, or regular with off_policy_correction.tis_ratio_type=token"
            )
        yield Problem("trainer.algorithm.policy_loss_type", loss, f"{KEY}: {fix}")


def _knows_the_sampler(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the loss accounts for what the responses were sampled from; one of a user may do as it likes."""
    algorithm = cfg.trainer.algorithm
    loss = algorithm.policy_loss_type
    if loss not in set(PolicyLossType) or loss in ("rollout_is", "dppo"):
        return True
    if loss == "cispo" and algorithm.cispo.anchor == "rollout":
        return True
    return loss not in UNCORRECTED and correction_enabled(algorithm.off_policy_correction)
