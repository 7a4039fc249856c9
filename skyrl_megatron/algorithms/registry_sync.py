"""The changes that processes make to the registries, exchanged through one small Ray actor.

The actor holds a numbered list of changes: a custom function, a replaced one, one taken away. Every process remembers
what it learnt, so that a new actor (after a restart of Ray, or when the old one went down with its owner) is told. Ray
is used when somebody else has imported and started it.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from skyrl_megatron.errors import AlgorithmError, DistributedError

ACTOR_NAME = "skyrl_megatron_registry"
ANSWER_TIMEOUT_S = 60.0


class RegistryVersion(NamedTuple):
    """What a process knows: which registry actor ("" for none), and how many of its changes."""

    actor: str
    changes: int


class Change(NamedTuple):
    """What became of one name of one registry.

    ``function`` is the pickle of what was registered, None where the name was taken away or given back to the built-in
    function; ``identity`` tells these and different functions apart.
    """

    registry: str
    name: str
    function: bytes | None
    identity: str


GONE, BUILT_IN = "gone", "built-in"


class Recorded(NamedTuple):
    """A change and its age, a number that grows from change to change and outlives an actor: the newer one holds."""

    age: int
    change: Change


class RegistryActor:
    """The list of changes. A plain class, made a Ray actor at the first sync."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.count = 0
        self.held: dict[tuple[str, str], tuple[int, Recorded]] = {}

    def version(self) -> RegistryVersion:
        """Return the number of the latest change."""
        return RegistryVersion(self.id, self.count)

    def register(self, remembered: list[Recorded]) -> RegistryVersion:
        """Take over what a process remembers that knew another actor, or none.

        Returns the version from which that process asks for news.
        """
        for recorded in remembered:
            _, held = self.held.get(recorded.change[:2], (0, None))
            if held is None or held.age < recorded.age:
                self._hold(recorded)
        return RegistryVersion(self.id, 0)

    def exchange(
        self, known: RegistryVersion, changes: list[Change]
    ) -> tuple[RegistryVersion, list[Recorded], list[Recorded]] | None:
        """Record ``changes``; return the version, what is new since ``known``, and the holders of refused names.

        A name is refused when it belongs to another function. The same function again, as from each process that
        imports its module, is no change. Returns None to a process that must :meth:`register` first.
        """
        if known.actor != self.id:
            return None
        refused = []
        for change in changes:
            _, held = self.held.get(change[:2], (0, None))
            if held is not None and held.change.identity == change.identity:
                continue
            if held is not None and held.change.function and change.function:
                refused.append(held)
            else:
                self._hold(Recorded(1 + max((recorded.age for _, recorded in self.held.values()), default=0), change))
        news = sorted((number, recorded) for number, recorded in self.held.values() if number > known.changes)
        return self.version(), [recorded for _, recorded in news], refused

    def _hold(self, recorded: Recorded) -> None:
        self.count += 1
        self.held[recorded.change[:2]] = (self.count, recorded)


class RegistryClient:
    """This process's end: what it knows, its changes that are pending, and the handle of the actor.

    ``apply`` carries out a change that another process made.
    """

    def __init__(self, apply: Callable[[Change], None]) -> None:
        self.apply = apply
        self.lock = threading.RLock()
        self.known = RegistryVersion("", 0)
        self.remembered: dict[tuple[str, str], Recorded] = {}
        self.pending: list[Change] = []
        self.session = ("", "")
        self.actor: Any = None

    def changed(self, registry: str) -> set[str]:
        """Return the names of a registry that were changed at any time, by any process that we heard of."""
        changes = [*self.pending, *(recorded.change for recorded in self.remembered.values())]
        return {change.name for change in changes if change.registry == registry}

    def note(self, change: Change) -> None:
        """Note a change made in this process; it is sent at once when Ray is up, else at the first sync."""
        with self.lock:
            self.pending.append(change)
            if connected_ray() is not None:
                self.sync()

    def sync(self) -> None:
        """Send what was changed here, apply what was changed elsewhere.

        Raises AlgorithmError when a name registered here belongs to another function of another process.
        """
        with self.lock:
            # None from an actor that does not know us: first contact, Ray restarted, or the old one is gone.
            while (reply := self._ask("exchange", self.known, self.pending)) is None:
                self.known = self._ask("register", list(self.remembered.values()))
            sent, self.pending = self.pending, []
            self.known, news, refused = reply
            for recorded in [*news, *refused]:
                change, before = recorded.change, self.remembered.get(recorded.change[:2])
                self.remembered[change[:2]] = recorded
                if change not in sent and (before is None or before.change != change):
                    self.apply(change)
        if refused:
            names = ", ".join(f"{change.registry} {change.name!r}" for _, change in refused)
            raise AlgorithmError(f"already registered with another function by another process: {names}")

    def version(self) -> RegistryVersion:
        """Return the actor's version, after sending it what was changed here and applying what is new."""
        with self.lock:
            version: RegistryVersion = self._ask("version")
            if self.pending or version != self.known:
                self.sync()
            return self.known

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor, which is started where there is none. One that is gone is replaced, once."""
        ray = connected_ray()
        if ray is None:
            raise AlgorithmError("Ray is not initialised: call ray.init() before the registries are synchronised")
        context = ray.get_runtime_context()
        session = (context.get_node_id(), context.get_job_id())  # another pair after each ray.init
        for attempt in (1, 2):
            if self.actor is None or session != self.session:
                actor_class = ray.remote(num_cpus=0)(RegistryActor)
                self.actor = actor_class.options(name=ACTOR_NAME, get_if_exists=True).remote()
                self.session = session
            try:
                return ray.get(getattr(self.actor, method).remote(*arguments), timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                raise DistributedError(
                    f"the registry of functions (Ray actor {ACTOR_NAME}) did not answer {method} within"
                    f" {ANSWER_TIMEOUT_S:g} s: look for a dead or overloaded node in `ray status`"
                ) from None
            except ray.exceptions.RayActorError:
                self.actor = None
                if attempt == 2:
                    raise


def connected_ray() -> Any:
    """Return the module ``ray`` when this process is connected to a cluster, else None."""
    if "ray" not in sys.modules:  # nobody connects without it, and importing it takes a second
        return None
    import ray

    return ray if ray.is_initialized() else None
