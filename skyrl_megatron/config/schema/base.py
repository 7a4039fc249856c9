"""The parent of the configuration classes: a section that can be read from a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from skyrl_megatron.config.fields import Section
from skyrl_megatron.config.parse import load


class BaseConfig(Section):
    """Parent of all configuration dataclasses."""

    @classmethod
    def from_dict_config(cls, cfg: Mapping[str, Any]) -> Self:
        return load.from_mapping(cls, cfg)
