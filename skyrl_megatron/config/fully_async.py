"""What follows from fully asynchronous rollouts: whether responses can be stale, runs repeat, and where groups are
stored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

SECTION = "trainer.fully_async"
ENABLED = f"{SECTION}.enabled"


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
        return cfg.trainer.fully_async.rollouts_path, f"{SECTION}.rollouts_path"
    return os.path.join(cfg.trainer.ckpt_path, "rollouts"), "trainer.ckpt_path"
