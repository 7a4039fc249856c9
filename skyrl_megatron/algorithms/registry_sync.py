"""The changes that processes make to the registries, exchanged through one small Ray actor.

The actor holds a numbered list of changes: a custom function, a replaced one, one taken away. Every process remembers
what it learnt, so that a new actor (after a restart of Ray, or when the old one went down with its owner) is told. Ray
is used when somebody else has started it, and never imported here.
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


class RegistryActor:
    """The list of changes. A plain class, made a Ray actor at the first sync."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.count = 0
        self.held: dict[tuple[str, str], tuple[int, Change]] = {}

    def version(self) -> RegistryVersion:
        """The latest change."""
        return RegistryVersion(self.id, self.count)

    def exchange(
        self, known: RegistryVersion, changes: list[Change], only_missing: bool = False
    ) -> tuple[RegistryVersion, list[Change], list[Change]]:
        """Record ``changes``; returns the version, what is new since ``known``, and who holds a refused name.

        A name is refused when it belongs to another function. The same function again, as from each process that
        imports its module, is no change. ``only_missing``: a process tells a new actor what it remembers of the old.
        """
        refused = []
        for change in changes:
            _, held = self.held.get(change[:2], (0, None))
            if held is not None and (only_missing or held.identity == change.identity):
                continue
            if held is not None and held.function and change.function:
                refused.append(held)
                continue
            self.count += 1
            self.held[change[:2]] = (self.count, change)
        after = known.changes if known.actor == self.id else 0
        news = sorted((number, change) for number, change in self.held.values() if number > after)
        return self.version(), [change for _, change in news], refused


class Link:
    """This process's end: what it knows, what it has changed and not told yet, and the handle of the actor.

    ``take_over`` carries out a change that another process made.
    """

    def __init__(self, take_over: Callable[[Change], None]) -> None:
        self.take_over = take_over
        self.lock = threading.RLock()
        self.known = RegistryVersion("", 0)
        self.remembered: dict[tuple[str, str], Change] = {}
        self.untold: list[Change] = []
        self.session = ("", "")
        self.actor: Any = None

    def note(self, change: Change) -> None:
        """A change made in this process; told at once when Ray is up, else at the first sync."""
        with self.lock:
            self.remembered[change[:2]] = change
            self.untold.append(change)
            if connected_ray() is not None:
                self.sync()

    def sync(self) -> None:
        """Tell what was changed here, learn what was changed elsewhere.

        Raises AlgorithmError when a name registered here belongs to another function of another process.
        """
        with self.lock:
            version, news, refused = self._ask("exchange", self.known, self.untold)
            if version.actor != self.known.actor and self.remembered:
                # A first contact, a restarted Ray, or an actor that went down with its owner: hand on what is known.
                version, news, _ = self._ask("exchange", self.known, list(self.remembered.values()), True)
            self.untold, self.known = [], version
            for change in [*news, *refused]:
                if self.remembered.get(change[:2]) != change:
                    self.remembered[change[:2]] = change
                    self.take_over(change)
        if refused:
            names = ", ".join(f"{change.registry} {change.name!r}" for change in refused)
            raise AlgorithmError(f"already registered with another function by another process: {names}")

    def version(self) -> RegistryVersion:
        """The actor's version, with everything changed here told."""
        with self.lock:
            version: RegistryVersion = self._ask("version")
            if self.untold or version.actor != self.known.actor:
                self.sync()
                return self.known
            return version

    def _ask(self, method: str, *arguments: Any) -> Any:
        """One call of the actor, made where there is none. One that is gone is replaced, once."""
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
    """The module ``ray`` when this process is connected to a cluster, else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
