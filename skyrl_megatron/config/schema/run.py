"""The whole configuration of a run, its conversion to YAML, and the keys that a subclass adds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Self, cast

from skyrl_megatron.config import load
from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import Section, default_of, field_docstrings, field_types, leaves, sections_of
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
from skyrl_megatron.config.schema.generator import DataConfig, EnvironmentConfig, GeneratorConfig
from skyrl_megatron.config.schema.training import TrainerConfig
from skyrl_megatron.config.table import ALGORITHM, ESTIMATORS, LOSSES
from skyrl_megatron.errors import ConfigError
from skyrl_megatron.plugins import load_plugins


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
    def with_named_sections(cls, given: Mapping[str, Any]) -> type[Self]:
        """Add the sections of losses and estimators that bring their settings with them (:mod:`..table`)."""
        algorithm = field_types(sections_of(sections_of(cls)["trainer"])["algorithm"])
        named = {str(given.get(table.key)) for table in (LOSSES, ESTIMATORS)} - LOSSES.built_in - ESTIMATORS.built_in
        named |= {key.split(".")[2] for key in given if key.startswith(f"{ALGORITHM}.") and key.count(".") > 2}
        unknown = sorted(named - {"None", *algorithm})
        if not unknown:
            return cls
        plugins = given.get("trainer.plugins")
        # A plugin that cannot be imported is reported with the other problems of the configuration.
        with contextlib.suppress(ConfigError):
            load_plugins(plugins if isinstance(plugins, list) else ())
        rows = {name: row for name in unknown for table in (LOSSES, ESTIMATORS) if (row := table.find(name))}
        sections = tuple((name, row.settings) for name, row in rows.items() if row.settings is not None)
        return cast("type[Self]", _with_algorithm_sections(cast("Any", cls), sections)) if sections else cls

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
    return _subclass(parent, [(name, section, field(default_factory=section)) for name, section in sections.items()])


def _subclass(parent: type[BaseConfig], fields: list[tuple[str, Any, Any]]) -> type[BaseConfig]:
    name = parent.__name__ if parent.__name__.startswith("Custom") else f"Custom{parent.__name__}"
    made = make_dataclass(name, fields, bases=(parent,), module=__name__)
    made.__doc__ = parent.__doc__
    return made


@functools.cache
def _with_algorithm_sections(
    cls: type[SkyRLTrainConfig], sections: tuple[tuple[str, type[Section]], ...]
) -> type[SkyRLTrainConfig]:
    """Return ``cls`` with more sections in ``trainer.algorithm``; its other defaults stay."""
    trainer: TrainerConfig = default_of(cls, "trainer")
    extended = _subclass(
        type(trainer.algorithm), [(name, made, field(default_factory=made)) for name, made in sections]
    )
    algorithm = functools.partial(_converted, trainer.algorithm, extended)
    of_trainer = _subclass(type(trainer), [("algorithm", extended, field(default_factory=algorithm))])
    made_trainer = functools.partial(_converted, trainer, of_trainer, "algorithm")
    return cast(
        "type[SkyRLTrainConfig]", _subclass(cls, [("trainer", of_trainer, field(default_factory=made_trainer))])
    )


def _converted(section: Section, cls: type[Section], *but: str) -> Section:
    """Return an object of the subclass ``cls`` with the values of ``section``, except of the fields ``but``."""
    names = [name for name in field_types(type(section)) if name not in but]
    made = cls(**{name: copy.deepcopy(getattr(section, name)) for name in names})
    made.__dict__["_given"] = section.__dict__.get("_given", frozenset())
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


def own_keys(cls: type[SkyRLTrainConfig]) -> Iterator[str]:
    """Yield a line for each key that ``cls`` has in addition to those of every run: key, default and the text under
    it."""
    of_every_run = {key for key, _, _ in leaves(SkyRLTrainConfig)}
    for key, owner, name in leaves(cls):
        if key not in of_every_run:
            try:
                text = " ".join(field_docstrings(owner).get(name, "").split())
            except (OSError, TypeError):  # a class without a source file, for example from a notebook
                text = ""
            yield f"  {key}={default_of(owner, name)}  {text}".rstrip()
