"""Environments by id. Ids that are not registered here are looked up in an installed ``skyrl_gym``."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.envs.base import BaseTextEnv
from skyrl_megatron.errors import DataError


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How an environment is made."""

    id: str
    entry_point: str | Callable[..., Any]
    """``module:Class``, or the class itself."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class beside ``env_config`` and ``extras``."""
    config: str = ""
    """Its section of ``environment.skyrl_gym``. Empty: the one named like the id, if there is one."""

    def load(self) -> Callable[..., Any]:
        """Import the class. Raises DataError when the entry point leads nowhere."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, name = self.entry_point.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return loaded
        except (ImportError, AttributeError, ValueError) as error:
            raise DataError(
                f"environment {self.id!r}: entry point {self.entry_point!r} cannot be loaded ({error}); it must read"
                " module:Class"
            ) from error


_registry: dict[str, EnvSpec] = {}


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: str = "",
    override: bool = False,
) -> None:
    """Make an environment known under ``id`` in this process.

    ``entry_point``: ``"module:Class"`` or the class. ``override``: take the place of whatever has the id, one that
    comes with the package included. The same registration again changes nothing; another one under an id that is
    taken raises DataError. Register in the process that runs the rollouts: in a plugin
    (:mod:`skyrl_megatron.plugins`), or in the script that starts the run.
    """
    spec_ = EnvSpec(id, entry_point, dict(kwargs or {}), config)
    taken = _registry.get(id)
    if taken is not None and taken != spec_ and not override:
        whose = "comes with the package" if _is_ours(taken) else "is registered already"
        raise DataError(
            f"environment {id!r} {whose} ({taken.entry_point}): take another id, or replace it with"
            f" register({id!r}, ..., override=True)"
        )
    _registry[id] = spec_


def deregister(id: str) -> None:
    """Forget an environment. Raises DataError when there is none."""
    del _registry[spec(id).id]


def _is_ours(spec_: EnvSpec) -> bool:
    return isinstance(spec_.entry_point, str) and spec_.entry_point.startswith("skyrl_megatron.envs.")


def spec(id: str) -> EnvSpec:
    """Return the registration of an id, ours or ``skyrl_gym``'s. Raises DataError that lists what there is."""
    found = _registry.get(id) or _gym_specs().get(id)
    if found is None:
        known = sorted({*_registry, *_gym_specs()})
        raise DataError(f"no environment {id!r}: register it with skyrl_megatron.envs.register, or use one of {known}")
    return found


def registered() -> list[str]:
    """Return all ids."""
    return sorted({*_registry, *_gym_specs()})


def require(ids: Iterable[str]) -> None:
    """Raise DataError for the first id that cannot be made."""
    for id in dict.fromkeys(ids):
        spec(id).load()


def make(id: str, env_config: Any = None, extras: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Make an environment for one episode; see :class:`BaseTextEnv` for the arguments.

    Anything with ``init``, ``step`` and ``close`` is accepted. Raises DataError for unknown ids and for classes that
    lack one of them; what the constructor raises passes through.
    """
    spec_ = spec(id)
    env = spec_.load()(env_config=env_config, extras=extras or {}, **{**copy.deepcopy(dict(spec_.kwargs)), **kwargs})
    missing = [name for name in ("init", "step", "close") if not callable(getattr(env, name, None))]
    if missing:
        raise DataError(
            f"environment {id!r}: {type(env).__name__} has no {', '.join(missing)}: derive from BaseTextEnv"
        )
    return env


def config_of(id: str, gym_config: Any) -> Any:
    """Return the section of ``environment.skyrl_gym`` that an environment reads; an empty dict when it has none."""
    return getattr(gym_config, spec(id).config or id, {})


def aggregate_metrics(id: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Reduce the metrics of a batch of episodes of one environment."""
    aggregate = getattr(spec(id).load(), "aggregate_metrics", BaseTextEnv.aggregate_metrics)
    return dict(aggregate(list(metrics)))


def _gym_specs() -> Mapping[str, EnvSpec]:
    """Return the registrations of ``skyrl_gym``, where it is installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return {}
    gym = importlib.import_module("skyrl_gym.envs.registration")
    return {id: EnvSpec(id, found.entry_point, found.kwargs) for id, found in gym.registry.items()}
