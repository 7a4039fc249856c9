"""Registries of functions by name, synchronised between all processes of a Ray cluster.

Each process holds a dictionary, so a lookup sends no message. One Ray actor per registry holds a numbered list of the
changes to the built-in functions: a function was added, replaced or removed. A process asks that actor

* when a name is not in its dictionary,
* when a call arrives with newer versions than its own: the caller sends :func:`registry_versions` with every
  dispatched call, and the worker first calls :func:`ensure_registry_versions`. A function that was registered again
  under its name is therefore used from the next call on,
* when :func:`sync_registries` is called, after ``ray.init()``.

Every process remembers the changes that it knows and sends them to a new actor, which is needed after a restart of Ray
or when the old actor died with its owner. Functions are serialised with cloudpickle, including lambdas and functions
of ``__main__``. Without Ray a registry is only a dictionary. This module imports Ray only if the process has done so.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from skyrl_megatron.config.table import ObjectiveTable
from skyrl_megatron.errors import AlgorithmError, DistributedError
from skyrl_megatron.plugins import load_path

ANSWER_TIMEOUT_S = 60.0


class RegistryVersion(NamedTuple):
    """The state that a process knows: the id of the registry actor ("" for none) and how many of its changes."""

    actor: str
    changes: int


class Change(NamedTuple):
    """A change of one name of a registry.

    ``function`` is the pickled function. It is None if the name was removed or reset to the built-in function.
    ``identity`` distinguishes these two cases and different functions.
    """

    name: str
    function: bytes | None
    identity: str


GONE, BUILT_IN = "gone", "built-in"


class DatedChange(NamedTuple):
    """A change and its age, a number that increases with every change, also over actors. The newest change wins."""

    age: int
    change: Change


class RegistryActor:
    """The changes of one registry, a Ray actor by the registry's ``_actor_name``.

    ``register``, ``get``, ``list_available``, ``unregister`` and ``registry`` are for direct callers of the actor;
    registries use ``exchange``. The actor does not hold built-in functions: every process imports them.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.count = 0
        self.entries: dict[str, tuple[int, DatedChange]] = {}

    # ------------------------------------------------------------------ the functions
    @property
    def registry(self) -> dict[str, bytes]:
        """Name → pickled function."""
        held = ((name, recorded.change.function) for name, (_, recorded) in self.entries.items())
        return {name: function for name, function in held if function is not None}

    def register(self, name: str, func_serialized: bytes) -> None:
        """Store a function pickled by cloudpickle, replacing any other. Processes get it at their next sync."""
        self._record_new(Change(str(name), func_serialized, hashlib.sha256(func_serialized).hexdigest()))

    def get(self, name: str) -> bytes | None:
        """Return the pickled function, or None if the name is not registered."""
        return self.registry.get(str(name))

    def list_available(self) -> list[str]:
        """Return the names of all functions."""
        return list(self.registry)

    def unregister(self, name: str) -> bytes | None:
        """Remove a function from every process and return it pickled, or None if the name is not registered."""
        function = self.get(name)
        if function is not None:
            self._record_new(Change(str(name), None, GONE))
        return function

    # ------------------------------------------------------------------ the changes
    def version(self) -> RegistryVersion:
        """Return the number of the latest change."""
        return RegistryVersion(self.id, self.count)

    def take_over(self, remembered: list[DatedChange]) -> RegistryVersion:
        """Merge the changes that a process remembers from an earlier actor.

        Returns the version from which that process must request changes.
        """
        for recorded in remembered:
            _, held = self.entries.get(recorded.change.name, (0, None))
            if held is None or held.age < recorded.age:
                self._record(recorded)
        return RegistryVersion(self.id, 0)

    def exchange(
        self, known: RegistryVersion, changes: list[Change]
    ) -> tuple[RegistryVersion, list[DatedChange], list[DatedChange]] | None:
        """Record ``changes``; return the version, the changes since ``known``, and the entries of refused names.

        A name is refused if it belongs to another function. Registering the same function again, as every process
        that imports its module does, is not a change. Returns None if the process knows another actor: it must call
        :meth:`take_over` first.
        """
        if known.actor != self.id:
            return None
        refused = []
        for change in changes:
            _, held = self.entries.get(change.name, (0, None))
            if held is not None and held.change.identity == change.identity:
                continue
            # A name without a function, removed or reset, is free for any function.
            if held is not None and held.change.function and change.function:
                refused.append(held)
            else:
                self._record_new(change)
        news = sorted((number, recorded) for number, recorded in self.entries.values() if number > known.changes)
        return self.version(), [recorded for _, recorded in news], refused

    def _record_new(self, change: Change) -> None:
        self._record(DatedChange(1 + max((recorded.age for _, recorded in self.entries.values()), default=0), change))

    def _record(self, recorded: DatedChange) -> None:
        self.count += 1
        self.entries[recorded.change.name] = (self.count, recorded)


@functools.cache
def registry_actor_class() -> Any:
    """Return :class:`RegistryActor` as a Ray actor class: ``.options(name=…, get_if_exists=True).remote()``."""
    import ray

    # No core: in a cluster whose cores are all reserved, an actor that needs one would never start.
    return ray.remote(num_cpus=0)(RegistryActor)


class RegistryClient:
    """The client of one registry in this process: known version, pending changes, and the handle of the actor.

    ``apply`` applies a change that another process made.
    """

    def __init__(self, actor_name: str, apply: Callable[[Change], None]) -> None:
        self.actor_name, self.apply = actor_name, apply
        # Reentrant: unpickling a change may import a module that registers functions itself.
        self.lock = threading.RLock()
        self.known = RegistryVersion("", 0)
        self.remembered: dict[str, DatedChange] = {}
        self.pending: list[Change] = []
        # Node and job of Ray. After another ray.init a handle of the earlier one reaches nothing.
        self.session = ("", "")
        self.actor: Any = None

    def changed(self) -> set[str]:
        """Return the names with a known change of any process."""
        return {change.name for change in self.pending} | set(self.remembered)

    def note(self, change: Change) -> None:
        """Record a change made in this process. It is sent at once if Ray is initialised, else at the first sync."""
        with self.lock:
            # Kept until it is sent: functions are registered at import, before Ray is initialised.
            self.pending.append(change)
            if connected_ray() is not None:
                self.sync()

    def connect(self) -> None:
        """Start the actor if there is none, without waiting for it."""
        self._handle(*_connection())

    def sync(self) -> None:
        """Send the changes of this process and apply those of others.

        Raises AlgorithmError if another process has registered another function under a name registered here.
        """
        with self.lock:
            if self._is_unchanged():
                return
            # None: the actor does not know this process (first contact, Ray restarted, or the old actor died).
            while (reply := self._ask("exchange", self.known, self.pending)) is None:
                self.known = self._ask("take_over", list(self.remembered.values()))
            # Only after the answer: if the call fails, the next sync sends them.
            sent, self.pending = self.pending, []
            self.known, news, refused = reply
            for recorded in [*news, *refused]:
                change, before = recorded.change, self.remembered.get(recorded.change.name)
                self.remembered[change.name] = recorded
                if change not in sent and (before is None or before.change != change):
                    self.apply(change)
        # After the loop: a refused name must not keep the changes of other names from this process.
        if refused:
            names = ", ".join(repr(change.name) for _, change in refused)
            raise AlgorithmError(
                f"another process has already registered another function as {names} ({self.actor_name}): choose"
                " another name"
            )

    def version(self) -> RegistryVersion:
        """Return the actor's version, after exchanging changes with it."""
        with self.lock:
            if self._is_unchanged():
                return self.known
            version: RegistryVersion = self._ask("version")
            if self.pending or version != self.known:
                self.sync()
            return self.known

    def _is_unchanged(self) -> bool:
        """Return whether no process has changed anything: this process has not, and there is no actor.

        The first change starts the actor, because starting one takes two seconds of a core.
        """
        ray, session = _connection()
        if self.changed() or (self.actor is not None and session == self.session):
            return False
        try:
            ray.get_actor(self.actor_name)
        except ValueError:
            return True
        return False

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor. Starts it if there is none, and replaces it once if it died."""
        ray, session = _connection()
        # An actor ends with the process that started it, so a handle may be dead while the cluster works.
        for attempt in (1, 2):
            handle = self._handle(ray, session)
            try:
                return ray.get(getattr(handle, method).remote(*arguments), timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                raise DistributedError(
                    f"the function registry (Ray actor {self.actor_name}) did not answer {method} within"
                    f" {ANSWER_TIMEOUT_S:g} s: look for a dead or overloaded node in `ray status`"
                ) from None
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
                self.actor = None
                if attempt == 2:
                    raise

    def _handle(self, ray: Any, session: tuple[str, str]) -> Any:
        if self.actor is None or session != self.session:
            # get_if_exists: several processes may start it at the same time.
            self.actor = registry_actor_class().options(name=self.actor_name, get_if_exists=True).remote()
            self.session = session
        return self.actor


def connected_ray() -> Any:
    """Return the module ``ray`` when this process is connected to a cluster, else None."""
    if "ray" not in sys.modules:  # importing Ray takes a second, and it cannot be connected without
        return None
    import ray

    return ray if ray.is_initialized() else None


def _connection() -> tuple[Any, tuple[str, str]]:
    """Return the module ``ray`` and its session. Raises AlgorithmError if Ray is not initialised."""
    ray = connected_ray()
    if ray is None:
        raise AlgorithmError("Ray is not initialised: call ray.init() before the registries are synchronised")
    context = ray.get_runtime_context()
    return ray, (context.get_node_id(), context.get_job_id())  # ray.init changes this pair


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
"""Actor name → registry."""


@functools.cache
def _client_of(actor_name: str) -> RegistryClient:
    """Return this process's client of a registry, which may get changes before the registry's module is imported."""

    def apply(change: Change) -> None:
        if actor_name in REGISTRIES:
            REGISTRIES[actor_name]._apply(change)

    return RegistryClient(actor_name, apply)


class BaseFunctionRegistry:
    """Functions by name; each subclass is a separate registry. Names are strings or ``StrEnum`` members.

    A subclass sets ``_function_type``, the kind of its functions, from which the name of its Ray actor is derived
    unless it sets ``_actor_name``. Errors are AlgorithmError (a ValueError) and list the registered names.
    """

    _function_type: ClassVar[str] = "function"
    _actor_name: ClassVar[str] = ""
    _rows: ClassVar[ObjectiveTable[Any]] = ObjectiveTable("", "", {})
    """The facts of the functions, of which those of a removed function go too."""
    _client: ClassVar[RegistryClient]
    _builtin: ClassVar[dict[str, Callable[..., Any] | str]]
    _functions: ClassVar[dict[str, Callable[..., Any] | str]]
    """Name → function, or the path of a built-in one that is imported when it is asked for."""
    _unloadable: ClassVar[dict[str, str]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._builtin, cls._functions, cls._unloadable = {}, {}, {}
        if "_actor_name" not in cls.__dict__:
            cls._actor_name = f"{cls._function_type.replace(' ', '_')}_registry"
        REGISTRIES[cls._actor_name], cls._client = cls, _client_of(cls._actor_name)
        for _, change in cls._client.remembered.values():  # known before this class was defined
            cls._apply(change)

    @classmethod
    def register(cls, name: str, func: Callable[..., Any]) -> None:
        """Register ``func`` as ``name`` in this process and, once Ray is initialised, in every process.

        A function of an importable module may be registered again, as each process that imports the module does.
        Raises AlgorithmError if the name belongs to another function or ``func`` is not callable.
        """
        name = str(name)
        if not callable(func):
            raise AlgorithmError(f"{cls._function_type} {name!r} must be callable, got {type(func).__name__}")
        # Functions without an import path cannot be recognised: each run of a lambda's line makes another object.
        registered = cls.get(name) if name in cls._functions else None
        if registered is not None and (_import_path(func) is None or _import_path(func) != _import_path(registered)):
            raise AlgorithmError(f"{cls._function_type} {name!r} is already registered. {cls._listing()}")
        cls._functions[name] = func
        cls._client.note(Change(name, *_pickled(func)))

    @classmethod
    def get(cls, name: str) -> Callable[..., Any]:
        """Return the function registered as ``name``. Asks the actor if this process does not know the name.

        Raises AlgorithmError if the name is not registered, or its function cannot be unpickled in this process.
        """
        if name not in cls._functions and connected_ray() is not None:
            cls._client.sync()
        if name in cls._functions:
            function = cls._functions[name]
            if isinstance(function, str):
                function = cls._functions[name] = load_path(function)
            return function
        if name in cls._unloadable:
            raise AlgorithmError(
                f"{cls._function_type} {str(name)!r} cannot be loaded in this process: {cls._unloadable[name]}"
            )
        raise AlgorithmError(f"{cls._function_type} {str(name)!r} is not registered. {cls._listing()}")

    @classmethod
    def list_available(cls) -> list[str]:
        """Return all names, including those registered by other processes."""
        if connected_ray() is not None:
            cls._client.sync()
        return list(cls._functions)

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove ``name`` from every process. Raises AlgorithmError if it is not registered."""
        name = str(name)
        # A function that cannot be loaded here can still be removed from the other processes.
        if name not in cls.list_available() and name not in cls._unloadable:
            raise AlgorithmError(f"{cls._function_type} {name!r} is not registered. {cls._listing()}")
        cls._functions.pop(name, None)
        cls._unloadable.pop(name, None)
        cls._forget_row(name)
        cls._client.note(Change(name, None, GONE))

    @classmethod
    def reset(cls) -> None:
        """Remove every function from this process, and custom functions from all processes (for tests)."""
        if connected_ray() is not None:
            cls._client.sync()
        for name in cls._client.changed():
            cls._client.note(Change(name, None, BUILT_IN if name in cls._builtin else GONE))
        for name in cls._functions:
            cls._forget_row(name)
        cls._functions.clear()
        cls._unloadable.clear()

    @classmethod
    def repopulate(cls) -> None:
        """Restore the built-in functions and remove all others."""
        cls.reset()
        cls.repopulate_registry()

    @classmethod
    def repopulate_registry(cls) -> None:
        """Restore missing built-in functions. Custom functions stay, also under a built-in name."""
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
    def add_builtins(cls, names: Iterable[str], functions: Mapping[Any, Callable[..., Any] | str]) -> None:
        """Add the built-in functions. Every process has them by importing this package, so they are never sent.

        A function may be given by its path, ``module:name``. Raises AlgorithmError if their names differ from
        ``names``, those of the rows in ``config/table.py``.
        """
        differing = {str(name) for name in names} ^ {str(name) for name in functions}
        if differing:
            raise AlgorithmError(
                f"{cls._function_type}: {', '.join(sorted(differing))}: every built-in function must have a row in"
                " skyrl_megatron/config/table.py, and every row there must have one"
            )
        cls._builtin = {str(name): function for name, function in functions.items()}
        # Changes that arrived before the import of this module take precedence over its functions.
        changed = cls._client.changed()
        cls._functions |= {name: function for name, function in cls._builtin.items() if name not in changed}

    @classmethod
    def _apply(cls, change: Change) -> None:
        """Apply a change that another process made."""
        # First: if the new function cannot be loaded, the old one must not be used in its place.
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
    def _forget_row(cls, name: str) -> None:
        """Remove the row of a custom function. That of a built-in function came with its module, which is imported
        once, and stays for :meth:`repopulate_registry`."""
        if name not in cls._builtin:
            cls._rows.remove(name)

    @classmethod
    def _listing(cls) -> str:
        return f"Registered: {', '.join(sorted(cls._functions)) or 'nothing'}"


def _pickled(func: Callable[..., Any]) -> tuple[bytes, str]:
    """Return the pickled function and its identity: its import path, or the hash of the pickle if it has none."""
    data = cloudpickle.dumps(func)
    return data, _import_path(func) or hashlib.sha256(data).hexdigest()


def _import_path(func: Callable[..., Any]) -> str | None:
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name else f"{module}.{name}"


def sync_registries() -> None:
    """Exchange the changes of all registries with the other processes. Call it after ``ray.init()``."""
    clients = [registry._client for registry in REGISTRIES.values()]
    for client in clients:
        client.connect()  # all actors start at the same time
    for client in clients:
        client.sync()


def exchange_changes() -> None:
    """Exchange changes like :func:`sync_registries`, but start no actor for an unchanged registry."""
    clients = [registry._client for registry in REGISTRIES.values()]
    for client in clients:
        if client.changed():
            client.connect()
    for client in clients:
        client.sync()


def registry_versions() -> RegistryVersions:
    """Return the latest version of each registry, which dispatched calls carry; {} without Ray.

    Takes one round trip to each actor, about a millisecond.
    """
    if connected_ray() is None:
        return {}
    return {name: registry._client.version() for name, registry in REGISTRIES.items()}


def ensure_registry_versions(versions: RegistryVersions) -> None:
    """Sync the registries that are older in this process than in ``versions``, which a dispatched call carries."""
    for actor_name, version in versions.items():
        # Not through REGISTRIES: the registry's module may not be imported in this process yet.
        client = _client_of(actor_name)
        # Numbers of different actors cannot be compared.
        if version.actor != client.known.actor or version.changes > client.known.changes:
            client.sync()


def repopulate_all_registries() -> None:
    """Restore missing built-in functions of all registries."""
    for registry in REGISTRIES.values():
        registry.repopulate_registry()
