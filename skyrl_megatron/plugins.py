"""Extension points: modules that users write, how every process finds them, and the classes that they register.

A plugin is a module that registers what it brings when it is imported. It is found by its name in ``trainer.plugins``,
or by an entry point of an installed package::

    [project.entry-points."skyrl_megatron.plugins"]
    mine = "my_package.my_module"

The driver imports plugins before it checks the configuration; ranks, engine actors and the engines' own processes
import them when they are built, or when they meet a name that they do not know. docs/guides/plugins.md says more.
Losses, estimators, environments and model families have registries of their own (:mod:`skyrl_megatron.algorithms`,
:mod:`skyrl_megatron.envs`, :mod:`bridges.families`).
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
"""Group of entry points."""
VARIABLE = "SKYRL_MEGATRON_PLUGINS"
"""Environment variable with the names of ``trainer.plugins``, comma-separated: it reaches every process of a run."""
FOLDERS = "SKYRL_MEGATRON_PLUGIN_FOLDERS"
"""Environment variable with the folders that commands were typed in: plugins may lie there. It reaches all as well."""


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, those named in the environment, and ``modules``.

    ``modules`` are added to the environment for the processes that this one starts. May be repeated at no cost.
    Raises ConfigError with each plugin that cannot be imported, and why.
    """
    named = [*filter(None, os.environ.get(VARIABLE, "").split(",")), *modules]
    found: list[tuple[str, str, Callable[[], Any]]]
    found = [(f"entry point {GROUP}.{point.name}", point.value, point.load) for point in _installed()]
    found += [("trainer.plugins", name, partial(import_module, name)) for name in dict.fromkeys(named)]
    if named:
        _look_in_folders()
    problems = []
    for key, value, load in found:
        try:
            load()
        except Exception as error:
            fix = "name a module that is installed, on PYTHONPATH, in this folder, or beside the script"
            problems.append(Problem(key, value, f"cannot be imported ({with_origin(error)}); {fix}"))
    if problems:
        raise ConfigError(problems)
    if named:
        os.environ[VARIABLE] = ",".join(dict.fromkeys(named))


def _look_in_folders() -> None:
    """Let imports find modules of the folder that the command was typed in, after everything that is installed."""
    folders = list(dict.fromkeys([*filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)), os.getcwd()]))
    os.environ[FOLDERS] = os.pathsep.join(folders)
    sys.path += [folder for folder in folders if folder not in sys.path]


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


class ClassRegistry:
    """Classes by the name that a configuration key gives them.

    ``built_in``: values of the key that the package answers to itself; ``reserved``: names that it uses beside them.
    """

    def __init__(self, key: str, *built_in: str, reserved: tuple[str, ...] = ()) -> None:
        self.key, self.built_in, self.reserved = key, built_in, reserved
        self._classes: dict[str, Callable[..., Any]] = {}

    def register[C: Callable[..., Any]](self, name: str) -> Callable[[C], C]:
        """Return a decorator that registers a class as ``name`` in this process.

        The same class again changes nothing. Raises ConfigError when the name belongs to another one.
        """

        def decorate(cls: C) -> C:
            known = self._classes.get(name)
            if name in (*self.built_in, *self.reserved) or (known is not None and _path(known) != _path(cls)):
                owner = _path(known) if known is not None else "built in"
                raise ConfigError([Problem(self.key, name, f"is taken ({owner}): register under another name")])
            self._classes[name] = cls
            return cls

        return decorate

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the class registered as ``name``, or None; an unknown name is looked for in all plugins first."""
        if name not in (*self.built_in, *self._classes):
            load_plugins()
        return self._classes.get(name)

    def problems(self, name: str) -> Iterator[Problem]:
        """Yield the problem of a configuration that asks for a name which nobody has registered."""
        known = (*self.built_in, *self._classes)
        if name not in known:
            yield Problem(self.key, name, f"not registered; known: {', '.join(known)}")


def _path(cls: Callable[..., Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_ENGINE = "generator.inference_engine."
GENERATORS = ClassRegistry("generator.name", "skyrl_gym")
ENGINES = ClassRegistry(f"{_ENGINE}backend", "vllm")
TRANSPORTS = ClassRegistry(f"{_ENGINE}weight_sync_backend", device.NCCL, device.GLOO, reserved=("ipc",))

register_generator = GENERATORS.register
register_engine = ENGINES.register
register_transport = TRANSPORTS.register
