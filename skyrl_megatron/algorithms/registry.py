"""Registries of functions by name, the same in every process of a Ray cluster.

Changes are exchanged through one small Ray actor per registry.

The actor holds a numbered list of changes: a custom function, a replaced one, one taken away. Every process remembers
what it learnt, so that a new actor (after a restart of Ray, or when the old one went down with its owner) is told. Ray
is used when somebody else has imported and started it.

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
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from skyrl_megatron.errors import AlgorithmError, DistributedError

ANSWER_TIMEOUT_S = 60.0


class RegistryVersion(NamedTuple):
    """What a process knows: which registry actor ("" for none), and how many of its changes."""

    actor: str
    changes: int


class Change(NamedTuple):
    """What became of one name of a registry.

    ``function`` is the pickle of what was registered, None where the name was taken away or given back to the built-in
    function; ``identity`` tells these and different functions apart.
    """

    name: str
    function: bytes | None
    identity: str


GONE, BUILT_IN = "gone", "built-in"


class Recorded(NamedTuple):
    """A change and its age, a number that grows from change to change and outlives an actor: the newer one holds."""

    age: int
    change: Change


class RegistryActor:
    """The changes of one registry, a Ray actor by the registry's ``_actor_name``.

    ``register``, ``get``, ``list_available``, ``unregister`` and ``registry`` are for whoever asks the actor itself;
    processes that use the registry ``exchange``. Built-in functions are not kept here: every process imports them.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.count = 0
        self.held: dict[str, tuple[int, Recorded]] = {}

    # ------------------------------------------------------------------ the functions
    @property
    def registry(self) -> dict[str, bytes]:
        """Name → pickled function."""
        held = ((name, recorded.change.function) for name, (_, recorded) in self.held.items())
        return {name: function for name, function in held if function is not None}

    def register(self, name: str, func_serialized: bytes) -> None:
        """Keep a function that cloudpickle made bytes of, in the place of any other; processes learn of it later."""
        self._hold_new(Change(str(name), func_serialized, hashlib.sha256(func_serialized).hexdigest()))

    def get(self, name: str) -> bytes | None:
        """Return a function as cloudpickle reads it, None for a name that nobody registered."""
        return self.registry.get(str(name))

    def list_available(self) -> list[str]:
        """Return the names of all functions."""
        return list(self.registry)

    def unregister(self, name: str) -> bytes | None:
        """Take a function away, everywhere, and return it."""
        function = self.get(name)
        if function is not None:
            self._hold_new(Change(str(name), None, GONE))
        return function

    # ------------------------------------------------------------------ the changes
    def version(self) -> RegistryVersion:
        """Return the number of the latest change."""
        return RegistryVersion(self.id, self.count)

    def take_over(self, remembered: list[Recorded]) -> RegistryVersion:
        """Take over what a process remembers that knew another actor, or none.

        Returns the version from which that process asks for news.
        """
        for recorded in remembered:
            _, held = self.held.get(recorded.change.name, (0, None))
            if held is None or held.age < recorded.age:
                self._hold(recorded)
        return RegistryVersion(self.id, 0)

    def exchange(
        self, known: RegistryVersion, changes: list[Change]
    ) -> tuple[RegistryVersion, list[Recorded], list[Recorded]] | None:
        """Record ``changes``; return the version, what is new since ``known``, and the holders of refused names.

        A name is refused when it belongs to another function. The same function again, as from each process that
        imports its module, is no change. Returns None to a process that the actor must :meth:`take_over` from first.
        """
        if known.actor != self.id:
            return None
        refused = []
        for change in changes:
            _, held = self.held.get(change.name, (0, None))
            if held is not None and held.change.identity == change.identity:
                continue
            if held is not None and held.change.function and change.function:
                refused.append(held)
            else:
                self._hold_new(change)
        news = sorted((number, recorded) for number, recorded in self.held.values() if number > known.changes)
        return self.version(), [recorded for _, recorded in news], refused

    def _hold_new(self, change: Change) -> None:
        self._hold(Recorded(1 + max((recorded.age for _, recorded in self.held.values()), default=0), change))

    def _hold(self, recorded: Recorded) -> None:
        self.count += 1
        self.held[recorded.change.name] = (self.count, recorded)


@functools.cache
def registry_actor_class() -> Any:
    """Return :class:`RegistryActor` as Ray makes actors of it: ``.options(name=…, get_if_exists=True).remote()``."""
    import ray

    return ray.remote(num_cpus=0)(RegistryActor)


class RegistryClient:
    """This process's end of one registry: what it knows, its changes that are pending, and the handle of the actor.

    ``apply`` carries out a change that another process made.
    """

    def __init__(self, actor_name: str, apply: Callable[[Change], None]) -> None:
        self.actor_name, self.apply = actor_name, apply
        self.lock = threading.RLock()
        self.known = RegistryVersion("", 0)
        self.remembered: dict[str, Recorded] = {}
        self.pending: list[Change] = []
        self.session = ("", "")
        self.actor: Any = None

    def changed(self) -> set[str]:
        """Return the names that were changed at any time, by any process that we heard of."""
        return {change.name for change in self.pending} | set(self.remembered)

    def note(self, change: Change) -> None:
        """Note a change made in this process; it is sent at once when Ray is up, else at the first sync."""
        with self.lock:
            self.pending.append(change)
            if connected_ray() is not None:
                self.sync()

    def connect(self) -> None:
        """Begin to start the actor where there is none; whoever asks it waits."""
        self._handle(*_connection())

    def sync(self) -> None:
        """Send what was changed here, apply what was changed elsewhere.

        Raises AlgorithmError when a name registered here belongs to another function of another process.
        """
        with self.lock:
            if self._alone():
                return
            # None from an actor that does not know us: first contact, Ray restarted, or the old one is gone.
            while (reply := self._ask("exchange", self.known, self.pending)) is None:
                self.known = self._ask("take_over", list(self.remembered.values()))
            sent, self.pending = self.pending, []
            self.known, news, refused = reply
            for recorded in [*news, *refused]:
                change, before = recorded.change, self.remembered.get(recorded.change.name)
                self.remembered[change.name] = recorded
                if change not in sent and (before is None or before.change != change):
                    self.apply(change)
        if refused:
            names = ", ".join(repr(change.name) for _, change in refused)
            raise AlgorithmError(
                f"already registered with another function by another process: {names} ({self.actor_name})"
            )

    def version(self) -> RegistryVersion:
        """Return the actor's version, after sending it what was changed here and applying what is new."""
        with self.lock:
            if self._alone():
                return self.known
            version: RegistryVersion = self._ask("version")
            if self.pending or version != self.known:
                self.sync()
            return self.known

    def _alone(self) -> bool:
        """Return whether no process has changed anything: this one has not, and there is no actor. The first change
        makes one, as a process that starts for nothing takes two seconds of a core."""
        ray, session = _connection()
        if self.changed() or (self.actor is not None and session == self.session):
            return False
        try:
            ray.get_actor(self.actor_name)
        except ValueError:
            return True
        return False

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor, which is started where there is none. One that is gone is replaced, once."""
        ray, session = _connection()
        for attempt in (1, 2):
            handle = self._handle(ray, session)
            try:
                return ray.get(getattr(handle, method).remote(*arguments), timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                raise DistributedError(
                    f"the registry of functions (Ray actor {self.actor_name}) did not answer {method} within"
                    f" {ANSWER_TIMEOUT_S:g} s: look for a dead or overloaded node in `ray status`"
                ) from None
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
                self.actor = None
                if attempt == 2:
                    raise

    def _handle(self, ray: Any, session: tuple[str, str]) -> Any:
        if self.actor is None or session != self.session:
            self.actor = registry_actor_class().options(name=self.actor_name, get_if_exists=True).remote()
            self.session = session
        return self.actor


def connected_ray() -> Any:
    """Return the module ``ray`` when this process is connected to a cluster, else None."""
    if "ray" not in sys.modules:  # nobody connects without it, and importing it takes a second
        return None
    import ray

    return ray if ray.is_initialized() else None


def _connection() -> tuple[Any, tuple[str, str]]:
    """Return the module ``ray`` and the session that it is connected to. Raises AlgorithmError where it is not."""
    ray = connected_ray()
    if ray is None:
        raise AlgorithmError("Ray is not initialised: call ray.init() before the registries are synchronised")
    context = ray.get_runtime_context()
    return ray, (context.get_node_id(), context.get_job_id())  # another pair after each ray.init


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
                " skyrl_megatron/config/schema/algorithm.py, and every name there must have one"
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
