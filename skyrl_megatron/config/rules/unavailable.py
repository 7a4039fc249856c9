"""Parts of the configuration that describe what cannot run: valid, checked, and refused by a run."""

from __future__ import annotations

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.fields import get_path
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.errors import ConfigError, Problem

WITHOUT_ENGINE = {
    "dots1": "vLLM has dropped its architecture Dots1ForCausalLM after 0.23",
    "solar_open": "vLLM 0.32 does not know its architecture SolarOpenForCausalLM",
}
"""Families that convert and train, but that no engine of this version runs: why."""


def require_available(cfg: SkyRLTrainConfig) -> None:
    """Raise ConfigError for a model that no engine runs."""
    key = "trainer.policy.model.path"
    path = get_path(cfg, key)
    family = ((read_hf_config(cfg) if path else None) or {}).get("model_type")
    if family in WITHOUT_ENGINE:
        fix = f"no engine runs {family}: {WITHOUT_ENGINE[family]}; take a model of another family"
        raise ConfigError([Problem(key, path, fix)])
