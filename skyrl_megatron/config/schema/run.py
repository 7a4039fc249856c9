"""The whole configuration of a run, and its conversion to YAML."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Self, cast

from skyrl_megatron.config import load
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
from skyrl_megatron.config.schema.generator import DataConfig, EnvironmentConfig, GeneratorConfig
from skyrl_megatron.config.schema.training import TrainerConfig
from skyrl_megatron.errors import ConfigError


@dataclass
class SkyRLTrainConfig(BaseConfig):
    """Everything a run needs. Each key can be set as ``section.key=value`` on the command line."""

    data: DataConfig = field(default_factory=DataConfig)
    """Datasets."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Rollouts."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environments."""

    def __post_init__(self) -> None:
        """Fill in the fields that depend on other fields (:func:`derive`)."""
        derive(self)

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | Mapping[str, Any]) -> Self:
        """Parse ``["trainer.seed=1", "--config", "run.yaml", …]``, or a dict of keys to values.

        In a dict, keys may be dotted, and a string for a field of another type is parsed like typed text. Flat
        ``generator.*`` engine keys of older scripts are translated with one DeprecationWarning. Raises ConfigError
        with every problem.
        """
        cfg, problems = load.parse(cls, args)
        if problems:
            raise ConfigError(problems)
        return cfg


def make_config(
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] | None = None,
    generator_cls: type[GeneratorConfig] | None = None,
) -> type[SkyRLTrainConfig]:
    """Return a SkyRLTrainConfig class with custom sections. With ``trainer_cls``, its algorithm section is used.

    >>> @dataclass
    ... class MyAlgorithmConfig(AlgorithmConfig):
    ...     overlong_buffer_len: int = 512
    >>> make_config(algorithm_cls=MyAlgorithmConfig).from_cli_overrides(["trainer.algorithm.overlong_buffer_len=64"])
    """
    if trainer_cls is None and algorithm_cls is not None:
        trainer_cls = cast("type[TrainerConfig]", _with_sections(TrainerConfig, {"algorithm": algorithm_cls}))
    sections = {"trainer": trainer_cls, "generator": generator_cls}
    chosen = {name: section for name, section in sections.items() if section is not None}
    return cast("type[SkyRLTrainConfig]", _with_sections(SkyRLTrainConfig, chosen))


def _with_sections(parent: type[BaseConfig], sections: Mapping[str, type[BaseConfig]]) -> type[BaseConfig]:
    fields = [(name, section, field(default_factory=section)) for name, section in sections.items()]
    made = make_dataclass(f"Custom{parent.__name__}", fields, bases=(parent,), module=__name__)
    made.__doc__ = parent.__doc__
    return made


def get_config_as_dict(cfg: BaseConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return nested plain values that YAML and JSON can represent."""
    if isinstance(cfg, Mapping):
        return {str(key): _plain(value) for key, value in cfg.items()}
    return cast("dict[str, Any]", _plain(cfg))


def get_config_as_yaml_str(cfg: BaseConfig) -> str:
    """Return YAML from which ``--config`` reads an equal configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(get_config_as_dict(cfg))))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, enum.Enum):
        return value.value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _escaped(value: Any) -> Any:
    """Escape ``${`` in strings with a backslash, so that OmegaConf does not read it as an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value
