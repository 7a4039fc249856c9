"""Parts of the configuration that describe features which are still to come: valid, checked, and refused by a run."""

from __future__ import annotations

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import get_path
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.errors import ConfigError, Problem

NOT_PUBLISHED = frozenset({"gpt_oss"})
"""Families whose experts the engines take in another form than rows of Megatron's tensors."""


def require_available(cfg: SkyRLTrainConfig) -> None:
    """Raise ConfigError for a model that no code can train yet."""
    key = "trainer.policy.model.path"
    path = get_path(cfg, key)
    family = ((read_hf_config(cfg) if path else None) or {}).get("model_type")
    if family in NOT_PUBLISHED:
        raise ConfigError([Problem(key, path, f"weights of {family} cannot be given to engines in this version")])
