"""The pool of a run's engines: their states and versions, routing, and isolation of requests that kill engines."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import itertools
import re
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_megatron import progress as spans
from skyrl_megatron.errors import EngineError, EngineGoneError, RequestError
from skyrl_megatron.inference.protocol import INITIAL_VERSION, Generation, InferenceEngine

REMEMBERED = 65536
PROBES = 2
"""Answered health probes that show that an engine survived a request. The first may be answered before the request."""
PROBE_S = 60.0
"""Deadline of each probe. An engine answers between two of its steps."""
MAX_SERIAL = 8
"""Up to this many suspects run one at a time."""
LOGS = "see workers/engine_N.log in the folder of the run"
"""Where the causes of a lost engine are, for messages."""
type Life = tuple[str, int]
"""One lifetime of an engine: (name, number of restarts)."""


class AdmittingEngine(Protocol):
    """The interface of :class:`EngineSlot` that :func:`run_suspect` needs."""

    admitting: asyncio.Lock
    suspected: set[asyncio.Future[Any]]
    why: str

    async def run[T](self, work: Awaitable[T]) -> T:
        """Await a request. Raises EngineGoneError if the engine dies."""

    async def probe(self, timeout_s: float) -> str:
        """Return when the engine has answered. Raises EngineGoneError."""


class SuspectRequests:
    """Requests that were in flight when an engine died (suspects), and requests that are known to kill engines.

    Suspects are retried. They are submitted to an engine one by one: the next one waits until the engine has survived
    the last one for :data:`PROBES` probes. A suspect runs alone, with no other suspect on the engine until it is
    answered, if it was lost with two engines or if there are at most :data:`MAX_SERIAL` suspects. (More would take too
    long.) If an engine dies with a single suspect on it, that request killed it, and is rejected from then on. If it
    dies with several, nothing is known. So a bad request costs two engines if few others were in flight, else three.
    The other requests are retried.
    """

    def __init__(self) -> None:
        self._suspected: OrderedDict[bytes, set[Life]] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def suspects(self, content: tuple[Any, ...]) -> bool:
        """Return whether an equal request was lost with an engine. Raises RequestError if it is rejected."""
        if not self._suspected and not self._refused:
            return False
        key = _key(content)
        if key in self._refused:
            raise RequestError(self._refused[key])
        return key in self._suspected

    def alone(self, content: tuple[Any, ...]) -> bool:
        """Return whether a suspect must run alone."""
        return len(self._suspected) <= MAX_SERIAL or len(self._suspected.get(_key(content), ())) > 1

    def suspect(self, content: tuple[Any, ...], life: Life) -> None:
        """Record that a request was in flight when an engine died."""
        key = _key(content)
        _remember(self._suspected, key, self._suspected.get(key, set()) | {life})

    def clear(self, content: tuple[Any, ...]) -> None:
        """Record that an engine answered a request."""
        if self._suspected:
            self._suspected.pop(_key(content), None)

    def refuse(self, content: tuple[Any, ...], why: str) -> RequestError:
        """Record that a request killed a second engine. Return the error that rejects it."""
        key = _key(content)
        self._suspected.pop(key, None)
        _remember(self._refused, key, why)
        return RequestError(why)


async def run_suspect[T](
    slot: AdmittingEngine,
    work: Callable[[], Awaitable[T]],
    *,
    suspected: Callable[[], bool] = lambda: True,
    alone: Callable[[], bool] = lambda: False,
) -> T:
    """Run a suspect and return its answer. Other suspects wait until the engine has survived this one, or with
    ``alone``, until this one is answered.

    Raises :class:`KilledByRequest` if the engine dies before that without another suspect on it, EngineGoneError if it
    dies later or with others, and :class:`NotSubmitted` if it died with the previous suspect or if this request is no
    longer ``suspected``, because an equal one was answered.
    """
    async with slot.admitting:
        if runs_alone := alone():
            while slot.suspected:
                await asyncio.wait(slot.suspected)
        if slot.why or not suspected():
            raise NotSubmitted(slot.why)
        lost: type[EngineGoneError] = EngineGoneError if slot.suspected else KilledByRequest
        request = asyncio.ensure_future(slot.run(work()))
        slot.suspected.add(request)
        request.add_done_callback(slot.suspected.discard)
        probes = asyncio.ensure_future(_probe_repeatedly(slot))
        try:
            await asyncio.wait([request, probes], return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and probes.exception() is not None:
                request.cancel()
                await asyncio.wait([request])
                raise lost(str(probes.exception()))
            if runs_alone:
                await asyncio.wait([request])
            if request.done() and isinstance(error := _error_of(request), EngineGoneError):
                raise lost(str(error)) from error
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            probes.cancel()
    try:
        return await request
    except asyncio.CancelledError:
        request.cancel()
        raise


class KilledByRequest(EngineGoneError):
    """An engine died from a request that had been lost with another engine before."""


class NotSubmitted(EngineGoneError):
    """A request was not submitted: the engine died before, or the request is no longer a suspect."""


async def _probe_repeatedly(slot: AdmittingEngine) -> None:
    for _ in range(PROBES):
        await slot.probe(PROBE_S)


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _key(content: tuple[Any, ...]) -> bytes:
    # The repr of a long array leaves out its middle: two long prompts would have one key.
    plain = [part.tolist() if hasattr(part, "tolist") else part for part in content]
    return hashlib.blake2b(repr(plain).encode(errors="backslashreplace"), digest_size=16).digest()


def _remember[V](there: OrderedDict[bytes, V], key: bytes, value: V) -> None:
    there[key] = value
    there.move_to_end(key)
    if len(there) > REMEMBERED:
        there.popitem(last=False)


SESSIONS_REMEMBERED = 65536
WITHDRAW_S = 10.0
"""How long an engine may take to end a cancelled request."""
_NUMBER = re.compile(r"(0x)?[0-9a-f]*\d[0-9a-f]*")


class EngineState(enum.Enum):
    """State of an engine."""

    STOPPED = "stopped"
    """Not started, or starting."""
    SERVING = "serving"
    """Runs on the published weights."""
    PAUSED = "paused"
    """Alive, but generates nothing: a sync is running, or its weights are not the published ones."""
    DEAD = "dead"
    """Dead or hung. Waits for a restart."""
    DROPPED = "dropped"
    """Not used for the rest of the run."""
    LEAVING = "leaving"
    """Gets no new requests. Those in flight may finish."""


@dataclass(eq=False)
class EngineSlot:
    """A slot of the pool. A restart replaces the engine in it."""

    name: str
    make: Callable[[], InferenceEngine]
    engine: InferenceEngine = field(init=False)
    state: EngineState = EngineState.STOPPED
    version: str = INITIAL_VERSION
    """Version of its last verified weights."""
    restarts: list[float] = field(default_factory=list)
    """Times of its restarts (``time.monotonic``)."""
    why: str = ""
    """Why the engine is dead or dropped."""
    joined: bool = False
    """It was started elsewhere and joined. The run cannot restart it: if it dies it is dropped, and may join again."""
    verified: bool = False
    """Whether its log-probs were compared with the trainer's since its start."""
    answered: int = 0
    """Number of answered requests."""
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    load: int = 0
    """KV cache that the requests in flight are predicted to need, in tokens."""
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a suspect is submitted (:func:`run_suspect`)."""
    suspected: set[asyncio.Future[Any]] = field(default_factory=set)
    """Suspects in flight."""

    _busy_since: float = 0.0

    def __post_init__(self) -> None:
        self.engine = self.make()

    @property
    def life(self) -> tuple[str, int]:
        """Return (name, number of restarts)."""
        return self.name, len(self.restarts)

    async def probe(self, timeout_s: float) -> str:
        """Return the engine's weight version when every process has answered.

        Raises EngineGoneError for any failure, because an engine that is shutting down may raise any error.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.engine.health()
                return await self.engine.version()
        except TimeoutError:
            raise EngineGoneError(f"hangs: no answer within {timeout_s:g} s") from None
        except EngineGoneError:
            raise
        except Exception as error:
            raise EngineGoneError(f"is not healthy: {error!r}") from error

    async def run[T](self, work: Awaitable[T], load: int = 0) -> T:
        """Await a request to the engine, which adds ``load``. Raises EngineGoneError as soon as the pool marks the
        engine dead."""
        task = asyncio.ensure_future(work)
        self.load += load
        if not self.in_flight:
            self._busy_since = time.time()
        self.in_flight.add(task)
        try:
            result = await task
            self.answered += 1
            return result
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # Only the request was cancelled: by mark_dead, not by whoever waits for it.
            if task.cancelled() and not (caller and caller.cancelling()):
                raise EngineGoneError(f"{self.name}: {self.why}") from None
            task.cancel()
            await asyncio.wait([task], timeout=WITHDRAW_S)  # a running generator cannot be closed
            raise
        finally:
            self.in_flight.discard(task)
            self.load -= load
            now = time.time()
            if not self.in_flight or now - self._busy_since > 1:  # also record an engine that is always busy
                spans.record(self.name, "requests", self._busy_since, now)
                self._busy_since = now


class EnginePool:
    """Starts engines, routes requests to them, and restarts or drops them.

    ``make``: one factory per engine. ``wait_s``: how long a request waits for a serving engine, for example during a
    sync or a restart. An engine serves only with the weights of version :attr:`published`.
    """

    def __init__(self, make: Sequence[Callable[[], InferenceEngine]], *, wait_s: float = 600.0) -> None:
        self._numbers = itertools.count()
        self.slots = [EngineSlot(f"engine {next(self._numbers)}", factory) for factory in make]
        self.wait_s = wait_s
        self.published = INITIAL_VERSION
        self.published_before: set[str] = {INITIAL_VERSION}
        """All versions ever published. A frozen request may have tokens from several of them."""
        self.newcomers = False
        """Engines may join at any time. Requests then wait for one even if the pool is empty."""
        self.sync_engine: Callable[[EngineSlot], Awaitable[None]] | None = None
        """Sends the published weights to one engine; None until there is a trainer."""
        self.asleep = False
        """The trainer uses the engines' GPUs until the next version is published."""
        self.changing = asyncio.Lock()
        """Locked during a sync, a restart or a drop of engines."""
        self.suspects = SuspectRequests()
        self._sessions: OrderedDict[str, EngineSlot] = OrderedDict()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ engine lifecycle
    async def start(self) -> None:
        """Start all engines. If one fails, end the others and raise its EngineError."""
        # Wait for all, also after a failure: an engine that is still starting would outlive the shutdown.
        results = await asyncio.gather(*(slot.engine.start() for slot in self.slots), return_exceptions=True)
        for slot, result in zip(self.slots, results, strict=True):
            if isinstance(result, BaseException):
                await self.shutdown()
                if isinstance(result, EngineError):
                    raise EngineError(f"{slot.name}: {result}") from result
                raise result
            self.serve(slot, INITIAL_VERSION)

    async def shutdown(self) -> None:
        """End all engines and their processes."""
        for slot in self.slots:
            slot.state = EngineState.STOPPED
        await asyncio.gather(*(slot.engine.shutdown() for slot in self.slots), return_exceptions=True)

    async def restart(self, slot: EngineSlot) -> None:
        """Replace a slot's engine. The new one is paused until it has the published weights."""
        await self.mark_dead(slot, slot.why or "restarted")  # a hung engine still holds its memory
        slot.restarts.append(time.monotonic())
        slot.engine = slot.make()
        await slot.engine.start()
        slot.verified = False
        self.serve(slot, INITIAL_VERSION)

    async def mark_dead(self, slot: EngineSlot, why: str, state: EngineState = EngineState.DEAD) -> None:
        """Kill an engine. Its requests fail with EngineGoneError and are retried on others. An engine that joined is
        removed from the pool."""
        slot.why, slot.state = why, EngineState.DROPPED if slot.joined else state
        if slot.joined and slot in self.slots:
            self.slots.remove(slot)
        for task in list(slot.in_flight):
            task.cancel()
        self._notify()
        with contextlib.suppress(Exception):  # its host may be gone; the run continues with the others
            await asyncio.wait_for(slot.engine.kill(), 30)

    def serve(self, slot: EngineSlot, version: str) -> None:
        """Record an engine's verified version. Let it serve if the version is the published one, else pause it."""
        slot.version = version
        if slot.state in (EngineState.LEAVING, EngineState.DROPPED):
            return
        slot.why = ""
        # A local engine loads the trainer's own model. What a joined one has is known only from its log-probs.
        serves = version == self.published and (slot.verified or not slot.joined)
        slot.state = EngineState.SERVING if serves else EngineState.PAUSED
        self._notify()

    def pause(self, slot: EngineSlot) -> None:
        """Send no more requests to an engine."""
        if slot.state is EngineState.SERVING:
            slot.state = EngineState.PAUSED

    async def sleep(self, timeout_s: float) -> None:
        """Free the GPU memory of all engines. Requests wait until the next sync wakes them.

        An engine that does not sleep within ``timeout_s`` is marked dead.
        """

        async def put_to_sleep(slot: EngineSlot) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await slot.engine.sleep(2)
            except Exception as error:  # an engine that is shutting down may raise any error
                await self.mark_dead(slot, f"did not go to sleep: {error!r}")

        self.asleep = True
        slots = self.alive()
        for slot in slots:
            self.pause(slot)
        await asyncio.gather(*map(put_to_sleep, slots))

    def publish(self, version: str) -> None:
        """Publish a version: only engines with this version serve."""
        self.published, self.asleep = version, False
        self.published_before.add(version)
        for slot in self.slots:
            if slot.state in (EngineState.SERVING, EngineState.PAUSED):
                self.serve(slot, slot.version)

    def alive(self) -> list[EngineSlot]:
        """List the engines that are serving or paused."""
        return [slot for slot in self.slots if slot.state in (EngineState.SERVING, EngineState.PAUSED)]

    def dead(self) -> list[EngineSlot]:
        """List the engines that wait for a restart."""
        return [slot for slot in self.slots if slot.state is EngineState.DEAD]

    async def drop(self, slot: EngineSlot, why: str) -> None:
        """Kill an engine and do not restart it."""
        await self.mark_dead(slot, why, EngineState.DROPPED)

    def accepts(self, generation: Generation) -> bool:
        """Return whether all tokens are from published versions."""
        return all(version in self.published_before for version, _, _ in generation.versions)

    async def published_soon(self, generation: Generation) -> bool:
        """Return whether all tokens are from published versions. Wait for a running sync, which may publish them."""
        if not self.accepts(generation):
            async with self.changing:
                pass
        return self.accepts(generation)

    # ------------------------------------------------------------------ engines that join and leave
    def join(self, engine: InferenceEngine) -> EngineSlot:
        """Add an engine that was started elsewhere. It serves when its weights have been verified."""
        slot = EngineSlot(f"engine {next(self._numbers)}", lambda: engine, joined=True)
        slot.state = EngineState.PAUSED
        self.slots.append(slot)
        self._notify()
        return slot

    async def leave(self, slot: EngineSlot, drain_s: float, why: str) -> int:
        """Remove an engine that joined. Return how many of its requests are retried on others.

        It gets no new requests. Those in flight may finish within ``drain_s``, unless they are frozen. A running sync
        ends first, because the engine's workers are in the trainer's process group.
        """
        frozen = slot.state is not EngineState.SERVING  # its requests make no progress, so there is no use in waiting
        slot.state, slot.why = EngineState.LEAVING, why
        if slot.in_flight and not frozen:
            await asyncio.wait(set(slot.in_flight), timeout=drain_s)
        moved = len(slot.in_flight)
        for task in list(slot.in_flight):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s), self.changing:
                pass
        await self.mark_dead(slot, why)
        return moved

    async def until_some_are_there(self, wait_s: float) -> bool:
        """Wait for an engine that is alive or can be restarted, if engines may join. Return whether there is one."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while self.newcomers and not (self.alive() or self.dead()):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    async def change(self) -> None:
        """Wait until an engine joins, leaves, dies, serves or pauses."""
        await self._changed.wait()

    async def until_joined(self, count: int) -> None:
        """Wait until ``count`` engines have joined."""
        while sum(slot.joined for slot in self.slots) < count:
            await self._changed.wait()

    # ------------------------------------------------------------------ routing
    async def serving(self, session: str | None = None) -> EngineSlot:
        """Return the engine for a request: that of its session, else the one with the least predicted KV cache, then
        with the fewest requests. An engine itself admits requests in their order: none is overtaken while it waits for
        KV blocks, and the youngest gives up its blocks first (vLLM's ``Scheduler.schedule``).

        Raises EngineError if none serves within ``wait_s``, or if all are dropped.
        """
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while not (candidates := [slot for slot in self.slots if slot.state is EngineState.SERVING]):
            if not self.newcomers and all(slot.state is EngineState.DROPPED for slot in self.slots):
                raise EngineError(f"all engines are dropped: {self.describe()}; {LOGS}, and start again")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(
                    f"no engine served within {self.wait_s:g} s: {self.describe()}; {LOGS}, or raise"
                    " trainer.phase_timeout_s"
                ) from None
        if session is None:
            return min(candidates, key=_load_of)
        slot = self._sessions.get(session)
        if slot not in candidates:
            slot = min(candidates, key=_load_of)
        self._sessions[session] = slot
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)
        return slot

    async def fixed(self, key: str) -> EngineSlot:
        """Return the engine of a key: always the same one while the same engines serve."""
        await self.serving()
        candidates = [slot for slot in self.slots if slot.state is EngineState.SERVING]
        return candidates[zlib.crc32(key.encode()) % len(candidates)]

    async def all_serving(self) -> list[EngineSlot]:
        """List all serving engines in order, at least one."""
        await self.serving()
        return [slot for slot in self.slots if slot.state is EngineState.SERVING]

    def describe(self) -> str:
        """Describe the state of every engine in one line."""
        described = (
            f"{slot.name} {slot.state.value} at version {slot.version}" + (f" ({slot.why})" if slot.why else "")
            for slot in self.slots
        )
        return "; ".join(described) or "the pool is empty"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _load_of(slot: EngineSlot) -> tuple[int, int]:
    return slot.load, len(slot.in_flight)


def same_failure(one: str, other: str) -> bool:
    """Return whether two error messages are equal except for numbers (process ids, addresses, times).

    One may contain more lines than the other, because messages quote the output of processes up to some time.
    """
    lines, others = ({line.strip() for line in _NUMBER.sub("#", text).splitlines()} for text in (one, other))
    return bool(lines and others) and (lines <= others or others <= lines)


def shares(count: int, engines: int) -> Iterator[range]:
    """Distribute ``count`` requests round-robin. Yield the indices of each engine's requests."""
    return (range(number, count, engines) for number in range(engines))
