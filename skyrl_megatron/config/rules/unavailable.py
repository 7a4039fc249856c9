"""Parts of the configuration that describe features which are still to come: valid, checked, and refused by a run."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import default_of, get_path, owner_of
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.errors import ConfigError, Problem

NOT_AVAILABLE: Mapping[str, str] = {
    "trainer.fully_async.max_staleness_steps": "fully asynchronous training",
    "trainer.fully_async.num_parallel_generation_workers": "fully asynchronous training",
}
"""Keys → the feature that they belong to. A run that sets one ends with an error instead of doing something else."""

NOT_PUBLISHED = frozenset({"gpt_oss"})
"""Families whose experts the engines take in another form than rows of Megatron's tensors."""


def require_available(cfg: SkyRLTrainConfig) -> None:
    """Raise ConfigError naming every setting of a feature that no code acts on yet."""
    problems = []
    for key, feature in NOT_AVAILABLE.items():
        section, name = owner_of(cfg, key)
        value = get_path(cfg, key)
        if value != default_of(type(section), name):
            problems.append(Problem(key, value, f"{feature}: not available in this version; leave it at its default"))
    key = "trainer.policy.model.path"
    path = get_path(cfg, key)
    family = ((read_hf_config(cfg) if path else None) or {}).get("model_type")
    if family in NOT_PUBLISHED:
        problems.append(Problem(key, path, f"weights of {family} cannot be given to engines in this version"))
    if problems:
        raise ConfigError(problems)
