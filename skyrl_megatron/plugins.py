"""Plugins: user modules that every process of a run imports, and the classes that they register.

A plugin is a module that registers its classes and functions on import. ``trainer.plugins`` names it, or an entry
point of an installed package does::

    [project.entry-points."skyrl_megatron.plugins"]
    mine = "my_package.my_module"

The packages around the core (``skyrl_megatron_agents`` and others) are plugins of this kind: their entry points
are in ``pyproject.toml``, and their ``__init__`` registers what they bring by path, so that nothing is imported before
it is used. The core names none of them.

The driver imports plugins before it checks the configuration. Ranks, engine actors and the processes of engines import
them at their start, or when they look up an unknown name. See docs/guides/plugins.md. Losses, estimators, environments
and model families have separate registries (:mod:`skyrl_megatron.algorithms`, :mod:`skyrl_megatron.envs`,
:mod:`bridges.families`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.errors import ConfigError, Problem, with_origin

GROUP = "skyrl_megatron.plugins"
"""Entry point group of plugins."""
VARIABLE = "SKYRL_MEGATRON_PLUGINS"
"""Environment variable with the comma-separated ``trainer.plugins``. Every process of a run inherits it."""
FOLDERS = "SKYRL_MEGATRON_PLUGIN_FOLDERS"
"""Environment variable with the working directories of commands, which can contain plugins. Inherited as well."""


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, those named in the environment, and ``modules``.

    ``modules`` are added to the environment of the processes that this one starts. Repeated calls cost nothing. Raises
    ConfigError with every plugin that cannot be imported and the reason.
    """
    named = [*filter(None, os.environ.get(VARIABLE, "").split(",")), *modules]
    points: list[tuple[str, str, Callable[[], Any]]]
    points = [(f"entry point {GROUP}.{point.name}", point.value, point.load) for point in _installed()]
    points += [("trainer.plugins", name, partial(import_module, name)) for name in dict.fromkeys(named)]
    if named:
        _look_in_folders()
    problems = []
    for key, value, load in points:
        try:
            load()
        except Exception as error:
            fix = "name a module that is installed, on PYTHONPATH, in this folder, or in the folder of the script"
            problems.append(Problem(key, value, f"cannot be imported ({with_origin(error)}); {fix}"))
    if problems:
        raise ConfigError(problems)
    if named:
        os.environ[VARIABLE] = ",".join(dict.fromkeys(named))


def _look_in_folders() -> None:
    """Append the working directory of the command to ``sys.path``, after all installed packages."""
    folders = list(dict.fromkeys([*filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)), os.getcwd()]))
    os.environ[FOLDERS] = os.pathsep.join(folders)
    sys.path += [folder for folder in folders if folder not in sys.path]


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


class ClassRegistry:
    """Classes by name, for one configuration key.

    ``built_in``: values of the key that the package implements. ``reserved``: other names that cannot be registered.
    """

    def __init__(self, key: str, *built_in: str, reserved: tuple[str, ...] = ()) -> None:
        self.key, self.built_in, self.reserved = key, built_in, reserved
        self._classes: dict[str, Callable[..., Any]] = {}
        self._paths: dict[str, str] = {}

    def register[C: Callable[..., Any]](self, name: str) -> Callable[[C], C]:
        """Return a decorator that registers a class as ``name`` in this process.

        Registering the same class again changes nothing. Raises ConfigError if the name belongs to another class.
        """

        def decorate(cls: C) -> C:
            known = self._classes.get(name)
            if name in (*self.built_in, *self.reserved) or (known is not None and _path(known) != _path(cls)):
                owner = _path(known) if known is not None else "built in"
                raise ConfigError([Problem(self.key, name, f"is taken ({owner}): register under another name")])
            self._classes[name] = cls
            return cls

        return decorate

    def register_path(self, name: str, path: str) -> None:
        """Register the class at ``path`` (``module:Class``), which is imported when it is looked up.

        Registering the same path again changes nothing. Raises ConfigError if the name is taken.
        """
        taken = self._paths.get(name) or (_path(self._classes[name]) if name in self._classes else None)
        if name in (*self.built_in, *self.reserved) or taken not in (None, path):
            owner = taken or "built in"
            raise ConfigError([Problem(self.key, name, f"is taken ({owner}): register under another name")])
        self._paths[name] = path

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the class registered as ``name``, or None. Loads all plugins first if the name is unknown."""
        if name not in (*self.built_in, *self._classes, *self._paths):
            load_plugins()
        if name in self._paths:
            registered: Callable[..., Any] = load_path(self._paths[name])
            return registered
        return self._classes.get(name)

    def problems(self, name: str) -> Iterator[Problem]:
        """Yield a configuration problem if ``name`` is not registered."""
        known = (*self.built_in, *self._classes, *self._paths)
        if name not in known:
            yield Problem(self.key, name, f"not registered; known: {', '.join(known)}")


class Additions[T]:
    """What acts in addition to the core at one place: registered functions or classes, as they were registered."""

    def __init__(self) -> None:
        self._items: dict[str, T | str] = {}

    def register(self, item: T) -> T:
        """Add a function or class; a decorator. Registering the same one again changes nothing."""
        self._items.setdefault(f"{item.__module__}:{item.__qualname__}", item)  # type: ignore[attr-defined]
        return item

    def register_path(self, path: str) -> None:
        """Add the function or class at ``path`` (``module:name``), which is imported when :meth:`all` is called."""
        self._items.setdefault(path, path)

    def all(self) -> list[T]:
        """Return everything registered. Loads all plugins first."""
        load_plugins()
        return [load_path(item) if isinstance(item, str) else item for item in self._items.values()]


def load_path(path: str) -> Any:
    """Return the function or class at ``module:name``. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _path(cls: Callable[..., Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


METRICS: dict[str, dict[str, str]] = {}
"""Name or pattern of a metric that :func:`register_metric` added → ``better``, ``unit`` and ``meaning``."""


def register_metric(name: str, *, direction: str = "", unit: str = "", meaning: str = "") -> None:
    """Declare a metric of your own, which a trainer, a generator or a callback of yours measures.

    ``trainer.stop_when`` and ``trainer.best_metric`` take only names of docs/metrics.md and declared ones. ``name``:
    ``*`` matches anything without a slash. ``direction``: ``higher`` or ``lower`` values are better; "": neither.
    Raises ConfigError for another direction.
    """
    if direction not in ("higher", "lower", ""):
        raise ConfigError([Problem(f"metric {name}: direction", direction, 'must be "higher", "lower" or ""')])
    METRICS[name] = {"better": direction, "unit": unit, "meaning": meaning}


CHECKS: Additions[Callable[..., Any]] = Additions()
"""Checks before a run starts."""
RECORDERS: Additions[Callable[..., Any]] = Additions()
"""What looks at a run while it continues and writes down what it sees."""
PARTS: Additions[Callable[..., Any]] = Additions()
"""Parts of a rank that act at the begin and end of its passes and steps."""

register_check = CHECKS.register
register_recorder = RECORDERS.register
register_part = PARTS.register

_ENGINE = "generator.inference_engine."
GENERATORS = ClassRegistry("generator.name", "skyrl_gym", "agent")
SAMPLERS = ClassRegistry("data.sampler", "shuffle", "in_order", "mixture", "list", "easy_to_hard", "pools")
ENGINES = ClassRegistry(f"{_ENGINE}backend", "vllm")
SANDBOXES = ClassRegistry("generator.agent.sandbox", "namespaces", "docker")
TRANSPORTS = ClassRegistry(f"{_ENGINE}weight_sync_backend", device.NCCL, device.GLOO, reserved=("ipc",))
GATES = ClassRegistry("trainer.algorithm.dynamic_sampling.gates", "reward", "length", "staleness", "nonfinite")

register_generator = GENERATORS.register
register_sampler = SAMPLERS.register
register_gate = GATES.register
register_engine = ENGINES.register
register_transport = TRANSPORTS.register
register_sandbox = SANDBOXES.register
