"""Registries of functions by name, the same in every process of a Ray cluster.

Each process holds a plain dictionary, so a lookup sends no message. What differs from the built-in functions is kept
as a list of changes by one small actor a registry (:mod:`skyrl_megatron.algorithms.registry_sync`). A process asks
that actor

* when a name is not in its dictionary,
* when a call arrives with newer versions than its own: the caller sends :func:`registry_versions` along with every
  dispatched call, the worker begins with :func:`ensure_registry_versions`. A function registered anew under its name
  is therefore seen at the next call,
* when told to, by :func:`sync_registries` after ``ray.init()``.

Functions travel by cloudpickle, lambdas and functions of ``__main__`` included. Without Ray all of this is a
dictionary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import cloudpickle

from skyrl_megatron.algorithms.registry_sync import (
    BUILT_IN,
    GONE,
    Change,
    RegistryClient,
    RegistryVersion,
    connected_ray,
)
from skyrl_megatron.errors import AlgorithmError

__all__ = [
    "BaseFunctionRegistry",
    "RegistryVersions",
    "ensure_registry_versions",
    "registry_versions",
    "repopulate_all_registries",
    "sync_registries",
]

type RegistryVersions = dict[str, RegistryVersion]
"""What a dispatched call carries: name of a registry's actor → the latest change known anywhere."""

REGISTRIES: dict[str, type[BaseFunctionRegistry]] = {}
"""Name of its actor → registry."""


@functools.cache
def _client_of(actor_name: str) -> RegistryClient:
    """Return this process's end of a registry, which may hear of changes before the registry's module is imported."""

    def apply(change: Change) -> None:
        if actor_name in REGISTRIES:
            REGISTRIES[actor_name]._apply(change)

    return RegistryClient(actor_name, apply)


class BaseFunctionRegistry:
    """Functions by name; each subclass is a registry of its own. Names are strings or ``StrEnum`` members.

    A subclass says what it holds (``_function_type``); its Ray actor is named after that, or by ``_actor_name``. All
    mistakes raise AlgorithmError (a ValueError) that lists what is registered.
    """

    _function_type: ClassVar[str] = "function"
    _actor_name: ClassVar[str] = ""
    _client: ClassVar[RegistryClient]
    _builtin: ClassVar[dict[str, Callable[..., Any]]]
    _functions: ClassVar[dict[str, Callable[..., Any]]]
    _unloadable: ClassVar[dict[str, str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._builtin, cls._functions, cls._unloadable = {}, {}, {}
        if "_actor_name" not in cls.__dict__:
            cls._actor_name = f"{cls._function_type.replace(' ', '_')}_registry"
        REGISTRIES[cls._actor_name], cls._client = cls, _client_of(cls._actor_name)
        for _, change in cls._client.remembered.values():  # learnt before this class was there
            cls._apply(change)

    @classmethod
    def register(cls, name: str, func: Callable[..., Any]) -> None:
        """Add ``func`` under ``name``, here and, once Ray is up, in every process.

        A function of an importable module may be registered again, as each process that imports the module does.
        Raises AlgorithmError when the name belongs to another function.
        """
        name = str(name)
        if not callable(func):
            raise AlgorithmError(f"{cls._function_type} {name!r} must be callable, got {type(func).__name__}")
        known = cls._functions.get(name)
        if known is not None and (_import_path(func) is None or _import_path(func) != _import_path(known)):
            raise AlgorithmError(f"{cls._function_type} {name!r} is already registered. {cls._listing()}")
        cls._functions[name] = func
        cls._client.note(Change(name, *_pickled(func)))

    @classmethod
    def get(cls, name: str) -> Callable[..., Any]:
        """Return the function called ``name``. A name known here is a dictionary lookup; another one is asked for."""
        try:
            return cls._functions[name]
        except KeyError:
            pass
        if connected_ray() is not None:
            cls._client.sync()
        if name in cls._functions:
            return cls._functions[name]
        if name in cls._unloadable:
            raise AlgorithmError(
                f"{cls._function_type} {str(name)!r} cannot be loaded in this process: {cls._unloadable[name]}"
            )
        raise AlgorithmError(f"{cls._function_type} {str(name)!r} is not registered. {cls._listing()}")

    @classmethod
    def list_available(cls) -> list[str]:
        """Return all names, those registered by other processes included."""
        if connected_ray() is not None:
            cls._client.sync()
        return list(cls._functions)

    @classmethod
    def unregister(cls, name: str) -> None:
        """Take ``name`` away, in every process. Raises AlgorithmError when it is not there."""
        name = str(name)
        if name not in cls.list_available() and name not in cls._unloadable:
            raise AlgorithmError(f"{cls._function_type} {name!r} is not registered. {cls._listing()}")
        cls._functions.pop(name, None)
        cls._unloadable.pop(name, None)
        cls._client.note(Change(name, None, GONE))

    @classmethod
    def reset(cls) -> None:
        """Forget every function in this process, and every custom one in all of them (for tests)."""
        if connected_ray() is not None:
            cls._client.sync()
        for name in cls._client.changed():
            cls._client.note(Change(name, None, BUILT_IN if name in cls._builtin else GONE))
        cls._functions.clear()
        cls._unloadable.clear()

    @classmethod
    def repopulate(cls) -> None:
        """Go back to the built-in functions and nothing else."""
        cls.reset()
        cls.repopulate_registry()

    @classmethod
    def repopulate_registry(cls) -> None:
        """Put back the built-in functions that are missing; custom ones, also under a built-in name, stay."""
        for name, func in cls._builtin.items():
            if name not in cls._functions:
                cls._functions[name] = func
                if name in cls._client.changed():
                    cls._client.note(Change(name, None, BUILT_IN))

    @classmethod
    def sync_with_actor(cls) -> None:
        """Exchange changes with the other processes. Raises AlgorithmError when Ray is not initialised."""
        cls._client.connect()
        cls._client.sync()

    @classmethod
    def add_builtins(cls, names: Iterable[str], functions: Mapping[Any, Callable[..., Any]]) -> None:
        """Add the functions that every process has by importing this package, and that therefore never travel.

        Raises AlgorithmError unless they are those of ``names``, by which the command line knows them.
        """
        differing = {str(name) for name in names} ^ {str(name) for name in functions}
        if differing:
            raise AlgorithmError(
                f"{cls._function_type}: {', '.join(sorted(differing))}: every built-in function must be named in"
                " skyrl_megatron/config/names.py, and every name there must have one"
            )
        cls._builtin = {str(name): function for name, function in functions.items()}
        changed = cls._client.changed()
        cls._functions |= {name: function for name, function in cls._builtin.items() if name not in changed}

    @classmethod
    def _apply(cls, change: Change) -> None:
        """Carry out a change that another process made."""
        cls._functions.pop(change.name, None)
        cls._unloadable.pop(change.name, None)
        if change.identity == BUILT_IN and change.name in cls._builtin:
            cls._functions[change.name] = cls._builtin[change.name]
        elif change.function is not None:
            try:
                cls._functions[change.name] = cloudpickle.loads(change.function)
            except Exception as error:  # a module missing here must not hide the other functions
                cls._unloadable[change.name] = f"{type(error).__name__}: {error}"

    @classmethod
    def _listing(cls) -> str:
        return f"Registered: {', '.join(sorted(cls._functions)) or 'nothing'}"


def _pickled(func: Callable[..., Any]) -> tuple[bytes, str]:
    """Return the pickle of a function and what tells it from others: its import path or, without one, its content."""
    data = cloudpickle.dumps(func)
    return data, _import_path(func) or hashlib.sha256(data).hexdigest()


def _import_path(func: Callable[..., Any]) -> str | None:
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name else f"{module}.{name}"


def sync_registries() -> None:
    """Exchange changes of all registries with the other processes; to be called after ``ray.init()``."""
    clients = [registry._client for registry in REGISTRIES.values()]
    for client in clients:
        client.connect()  # their actors start at the same time
    for client in clients:
        client.sync()


def exchange_changes() -> None:
    """Exchange what was changed, as :func:`sync_registries` does; where nothing was, no actor starts for it."""
    clients = [registry._client for registry in REGISTRIES.values()]
    for client in clients:
        if client.changed():
            client.connect()
    for client in clients:
        client.sync()


def registry_versions() -> RegistryVersions:
    """Return what a dispatched call carries: the latest change of each registry known anywhere.

    One round trip to each actor, about a millisecond; nothing without Ray.
    """
    if connected_ray() is None:
        return {}
    return {name: registry._client.version() for name, registry in REGISTRIES.items()}


def ensure_registry_versions(versions: RegistryVersions) -> None:
    """Sync where this process knows less than ``versions``, which a dispatched call carries; else just compare."""
    for actor_name, version in versions.items():
        client = _client_of(actor_name)
        if version.actor != client.known.actor or version.changes > client.known.changes:
            client.sync()


def repopulate_all_registries() -> None:
    """Put back every built-in function that is missing."""
    for registry in REGISTRIES.values():
        registry.repopulate_registry()
