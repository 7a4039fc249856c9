"""The changes that processes make to the registries, exchanged through small Ray actors, one for each registry.

The actor holds a numbered list of changes: a custom function, a replaced one, one taken away. Every process remembers
what it learnt, so that a new actor (after a restart of Ray, or when the old one went down with its owner) is told. Ray
is used when somebody else has imported and started it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

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
