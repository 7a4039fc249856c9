"""The checkpoints of a run, as its configuration asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer, RoleRanks

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


def run_checkpointer(cfg: SkyRLTrainConfig, roles: Mapping[str, RoleRanks]) -> Checkpointer:
    """Return what saves and resumes the trained ``roles`` under ``trainer.ckpt_path``.

    With ``megatron_config.async_dist_ckpt_save`` a save returns once all ranks have copied their state.
    """
    return Checkpointer(
        cfg.trainer.ckpt_path,
        roles,
        keep=cfg.trainer.max_ckpts_to_keep,
        asynchronous=cfg.trainer.policy.megatron_config.async_dist_ckpt_save,
        timeout_s=cfg.trainer.phase_timeout_s,
    )
