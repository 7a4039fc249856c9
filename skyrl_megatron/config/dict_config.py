"""Configurations that a script holds as an omegaconf ``DictConfig``, as Hydra hands them over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate

from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.fields import Section, sections_of
from skyrl_megatron.config.schema.root import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig

type AnyConfig = SkyRLTrainConfig | DictConfig


def typed_config(cfg: AnyConfig) -> SkyRLTrainConfig:
    """Return ``cfg`` itself, or the values of a ``DictConfig`` as typed and checked fields.

    Keys that are left out take their defaults, flat ones of older scripts are translated. A ``DictConfig`` does not
    tell what somebody asked for from what its file holds anyway: values equal to the default count as not asked for
    (:meth:`Section.is_set`). Raises ConfigError with every unknown key and wrong value; keys of one's own need a class
    of one's own (``make_config``).
    """
    if isinstance(cfg, Section):
        return cfg
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = SkyRLTrainConfig.from_cli_overrides(cfg)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError([Problem(error.full_key or "cfg", "", str(error).splitlines()[0])]) from error
    _forget_given(typed)
    derive(typed)
    return typed


def accepts_dict_config[**P, R](check: Callable[Concatenate[SkyRLTrainConfig, P], R]) -> Callable[..., R]:
    """Let a function that changes a configuration in place take a ``DictConfig`` too, changed alike (a decorator)."""

    @functools.wraps(check)
    def checked(cfg: AnyConfig, *args: P.args, **kwargs: P.kwargs) -> R:
        typed = typed_config(cfg)
        result = check(typed, *args, **kwargs)
        if not isinstance(cfg, Section):
            _write_back(typed, cfg)
        return result

    return checked


def _write_back(typed: SkyRLTrainConfig, cfg: DictConfig) -> None:
    """Give ``cfg`` the values of ``typed``, all keys and no others, whether Hydra locked it or not."""
    from omegaconf import OmegaConf, open_dict, read_write

    values = OmegaConf.create(get_config_as_yaml_str(typed))
    with read_write(cfg), open_dict(cfg):
        cfg.clear()
        cfg.update(values)


def _forget_given(section: Section) -> None:
    section.__dict__["_given"] = frozenset()
    for name in sections_of(type(section)):
        inner = getattr(section, name)
        if isinstance(inner, Section):
            _forget_given(inner)
