"""The engines of a run: which serve, at which version, what each is busy with, and which requests ended one."""

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
PROOFS = 2
"""Answers of an engine after which it has read a request: the first may come from before."""
PROOF_S = 60.0
"""For each of them; an engine answers between two of its steps."""
ALONE = 8
"""So few suspects are given one after the other, each once the one before it is answered."""
type Life = tuple[str, int]
"""An engine between two of its starts: name, restarts."""


class AdmittingEngine(Protocol):
    """What is needed of an :class:`~skyrl_megatron.inference.pool.EngineSlot`."""

    admitting: asyncio.Lock
    suspected: set[asyncio.Future[Any]]
    why: str

    async def run[T](self, work: Awaitable[T]) -> T:
        """Await a request. Raises EngineGoneError when the engine is lost."""

    async def probe(self, timeout_s: float) -> str:
        """Return once the engine has answered. Raises EngineGoneError."""


class Suspects:
    """Content of requests that were lost with an engine, and of those that ended a second one.

    A suspect is given to an engine while no other suspect is being given to it, until the engine was seen to live on
    with it. It is given alone, with no other suspect beside it until it is answered, if it was lost with two engines,
    or there are at most :data:`ALONE` suspects: many would take too long in turn. An engine that is lost with a single
    suspect on it was ended by that one, which is refused from then on; a loss with several proves nothing. So one
    request costs two engines where few were in flight beside it, else three, and those beside it are made again.
    """

    def __init__(self) -> None:
        self._suspected: OrderedDict[bytes, set[Life]] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def suspects(self, content: tuple[Any, ...]) -> bool:
        """Return whether a request of this content was lost. Raises RequestError for one that ended two engines."""
        if not self._suspected and not self._refused:
            return False
        key = _key(content)
        if key in self._refused:
            raise RequestError(self._refused[key])
        return key in self._suspected

    def alone(self, content: tuple[Any, ...]) -> bool:
        """Return whether a suspect is to be given alone."""
        return len(self._suspected) <= ALONE or len(self._suspected.get(_key(content), ())) > 1

    def suspect(self, content: tuple[Any, ...], life: Life) -> None:
        """Note that a request was in flight when an engine was lost."""
        key = _key(content)
        _remember(self._suspected, key, self._suspected.get(key, set()) | {life})

    def clear(self, content: tuple[Any, ...]) -> None:
        """Note that an engine answered a request."""
        if self._suspected:
            self._suspected.pop(_key(content), None)

    def refuse(self, content: tuple[Any, ...], why: str) -> RequestError:
        """Note that a request ended a second engine; return the error that refuses it."""
        key = _key(content)
        self._suspected.pop(key, None)
        _remember(self._refused, key, why)
        return RequestError(why)


async def proven[T](
    slot: AdmittingEngine,
    work: Callable[[], Awaitable[T]],
    *,
    suspected: Callable[[], bool] = lambda: True,
    alone: Callable[[], bool] = lambda: False,
) -> T:
    """Await a suspect's answer; no other is given to the engine until it was seen to live on with this one, or with
    ``alone`` until this one is answered.

    Raises :class:`EndedByRequest` when the engine is lost before that with no other suspect on it, EngineGoneError
    when it is lost later or with others, :class:`NotGiven` when it was lost with the suspect before this one, or
    an equal request was answered meanwhile, after which this one is not ``suspected`` any more.
    """
    async with slot.admitting:
        if by_itself := alone():
            while slot.suspected:
                await asyncio.wait(slot.suspected)
        if slot.why or not suspected():
            raise NotGiven(slot.why)
        ended: type[EngineGoneError] = EngineGoneError if slot.suspected else EndedByRequest
        request = asyncio.ensure_future(slot.run(work()))
        slot.suspected.add(request)
        request.add_done_callback(slot.suspected.discard)
        proof = asyncio.ensure_future(_lives_on(slot))
        try:
            await asyncio.wait([request, proof], return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and proof.exception() is not None:
                request.cancel()
                await asyncio.wait([request])
                raise ended(str(proof.exception()))
            if by_itself:
                await asyncio.wait([request])
            if request.done() and isinstance(error := _error_of(request), EngineGoneError):
                raise ended(str(error)) from error
        except asyncio.CancelledError:
            request.cancel()
            raise
        finally:
            proof.cancel()
    try:
        return await request
    except asyncio.CancelledError:
        request.cancel()
        raise


class EndedByRequest(EngineGoneError):
    """An engine was lost when it was given a request that was lost with another one before."""


class NotGiven(EngineGoneError):
    """A request was not given to an engine: it was lost before, or the request is no suspect any more."""


async def _lives_on(slot: AdmittingEngine) -> None:
    for _ in range(PROOFS):
        await slot.probe(PROOF_S)


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _key(content: tuple[Any, ...]) -> bytes:
    plain = [part.tolist() if hasattr(part, "tolist") else part for part in content]
    return hashlib.blake2b(repr(plain).encode(errors="backslashreplace"), digest_size=16).digest()


def _remember[V](there: OrderedDict[bytes, V], key: bytes, value: V) -> None:
    there[key] = value
    there.move_to_end(key)
    if len(there) > REMEMBERED:
        there.popitem(last=False)


SESSIONS_REMEMBERED = 65536
WITHDRAW_S = 10.0
"""How long an engine has to end a request that nobody waits for."""
_NUMBER = re.compile(r"(0x)?[0-9a-f]*\d[0-9a-f]*")


class EngineState(enum.Enum):
    """State of an engine."""

    STOPPED = "stopped"
    """Not started, or being started."""
    SERVING = "serving"
    """Runs on the published weights."""
    PAUSED = "paused"
    """Alive, and generates nothing: a sync is under way, or its weights are not the published ones."""
    DEAD = "dead"
    """Dead or hung; waits for a restart."""
    DROPPED = "dropped"
    """Left out for the rest of the run."""
    LEAVING = "leaving"
    """Gets no more requests; those in flight may finish."""


@dataclass(eq=False)
class EngineSlot:
    """One engine's place in the pool; the engine in it may be replaced."""

    name: str
    make: Callable[[], InferenceEngine]
    engine: InferenceEngine = field(init=False)
    state: EngineState = EngineState.STOPPED
    version: str = INITIAL_VERSION
    """Version of the weights that were verified on it last."""
    restarts: list[float] = field(default_factory=list)
    """When it was restarted, as ``time.monotonic`` says."""
    why: str = ""
    """Reason why an engine is dead or dropped."""
    joined: bool = False
    """Started elsewhere and joined: nobody here can restart it. One that is lost is dropped, and may join again."""
    verified: bool = False
    """Whether its log-probs were compared with the trainer's since it was started."""
    answered: int = 0
    """Requests that it answered."""
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a suspect is given to it (:mod:`~skyrl_megatron.inference.pool`)."""
    suspected: set[asyncio.Future[Any]] = field(default_factory=set)
    """Suspects that it was given and has not answered."""

    _busy_since: float = 0.0

    def __post_init__(self) -> None:
        self.engine = self.make()

    @property
    def life(self) -> tuple[str, int]:
        """What is this engine's own between two of its starts."""
        return self.name, len(self.restarts)

    async def probe(self, timeout_s: float) -> str:
        """Return the version that the engine says it runs on, once every process of it has answered.

        Raises EngineGoneError for any failure: an engine that is shutting down may raise any error.
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

    async def run[T](self, work: Awaitable[T]) -> T:
        """Await a request to the engine. Raises EngineGoneError as soon as the pool marks the engine dead."""
        task = asyncio.ensure_future(work)
        if not self.in_flight:
            self._busy_since = time.time()
        self.in_flight.add(task)
        try:
            result = await task
            self.answered += 1
            return result
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):
                raise EngineGoneError(f"{self.name}: {self.why}") from None
            task.cancel()
            await asyncio.wait([task], timeout=WITHDRAW_S)  # a generator that still runs cannot be closed
            raise
        finally:
            self.in_flight.discard(task)
            now = time.time()
            if not self.in_flight or now - self._busy_since > 1:  # what is always busy is told of too
                spans.record(self.name, "requests", self._busy_since, now)
                self._busy_since = now


class EnginePool:
    """Starts, routes to, and restarts or drops engines. ``make``: one function per engine that makes its handle.

    An engine serves when it runs on the weights of :attr:`published`, and only then. ``wait_s``: how long a request
    waits for an engine that serves, as during a sync or a restart.
    """

    def __init__(self, make: Sequence[Callable[[], InferenceEngine]], *, wait_s: float = 600.0) -> None:
        self._numbers = itertools.count()
        self.slots = [EngineSlot(f"engine {next(self._numbers)}", each) for each in make]
        self.wait_s = wait_s
        self.published = INITIAL_VERSION
        self.published_before: set[str] = {INITIAL_VERSION}
        """Every version that was ever published; a frozen request may carry older ones."""
        self.newcomers = False
        """Engines may join at any time, so that a pool without any is one to wait for."""
        self.asleep = False
        """The engines' GPUs are the trainer's until the next version is published."""
        self.changing = asyncio.Lock()
        """Locked by whoever syncs, restarts or drops engines."""
        self.suspects = Suspects()
        """Requests that were lost with an engine."""
        self._sessions: OrderedDict[str, EngineSlot] = OrderedDict()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ life of the engines
    async def start(self) -> None:
        """Start all engines. Raises EngineError of the first that fails, after ending the others."""
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
        """Replace a slot's engine by a fresh one, which is paused until its weights are the published ones."""
        await self.mark_dead(slot, slot.why or "restarted")
        slot.restarts.append(time.monotonic())
        slot.engine = slot.make()
        await slot.engine.start()
        slot.verified = False
        self.serve(slot, INITIAL_VERSION)

    async def mark_dead(self, slot: EngineSlot, why: str, state: EngineState = EngineState.DEAD) -> None:
        """Kill an engine; its requests fail with EngineGoneError, and their callers go to another. One that joined is
        taken out of the pool."""
        slot.why, slot.state = why, EngineState.DROPPED if slot.joined else state
        if slot.joined and slot in self.slots:
            self.slots.remove(slot)
        for task in list(slot.in_flight):
            task.cancel()
        self._notify()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(slot.engine.kill(), 30)

    def serve(self, slot: EngineSlot, version: str) -> None:
        """Let an engine whose weights were verified serve if they are the published ones, else pause it."""
        slot.version = version
        if slot.state in (EngineState.LEAVING, EngineState.DROPPED):
            return  # it left meanwhile
        slot.why = ""
        serves = version == self.published and (slot.verified or not slot.joined)
        slot.state = EngineState.SERVING if serves else EngineState.PAUSED
        self._notify()

    def pause(self, slot: EngineSlot) -> None:
        """Send nothing more to an engine."""
        if slot.state is EngineState.SERVING:
            slot.state = EngineState.PAUSED

    async def sleep(self, timeout_s: float) -> None:
        """Free the GPU memory of all engines; requests wait for the next version, whose sync wakes them. An engine
        that does not sleep within ``timeout_s`` is marked dead."""

        async def put_to_sleep(slot: EngineSlot) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await slot.engine.sleep(2)
            except Exception as error:  # an engine that is shutting down may raise any
                await self.mark_dead(slot, f"did not go to sleep: {error!r}")

        self.asleep = True
        slots = self.alive()
        for slot in slots:
            self.pause(slot)
        await asyncio.gather(*map(put_to_sleep, slots))

    def publish(self, version: str) -> None:
        """Let only engines with this version serve from now on."""
        self.published, self.asleep = version, False
        self.published_before.add(version)
        for slot in self.slots:
            if slot.state in (EngineState.SERVING, EngineState.PAUSED):
                self.serve(slot, slot.version)

    def alive(self) -> list[EngineSlot]:
        """List the engines that answer: serving or paused."""
        return [slot for slot in self.slots if slot.state in (EngineState.SERVING, EngineState.PAUSED)]

    def dead(self) -> list[EngineSlot]:
        """List the engines that wait for a restart."""
        return [slot for slot in self.slots if slot.state is EngineState.DEAD]

    async def drop(self, slot: EngineSlot, why: str) -> None:
        """Do without an engine for the rest of the run."""
        await self.mark_dead(slot, why, EngineState.DROPPED)

    def accepts(self, generation: Generation) -> bool:
        """Return whether every token was sampled from published weights."""
        return all(version in self.published_before for version, _, _ in generation.versions)

    async def published_soon(self, generation: Generation) -> bool:
        """Return whether every token is from published weights, once no sync is under way that may publish them."""
        if not self.accepts(generation):
            async with self.changing:
                pass
        return self.accepts(generation)

    # ------------------------------------------------------------------ engines that join and leave
    def join(self, engine: InferenceEngine) -> EngineSlot:
        """Take in an engine that was started elsewhere. It serves nothing until its weights were verified."""
        slot = EngineSlot(f"engine {next(self._numbers)}", lambda: engine, joined=True)
        slot.state = EngineState.PAUSED
        self.slots.append(slot)
        self._notify()
        return slot

    async def leave(self, slot: EngineSlot, drain_s: float, why: str) -> int:
        """Let an engine that joined go; return how many of its requests are made again on others.

        It gets no more requests at once, and those in flight may finish for ``drain_s``, unless they are frozen. A
        sync that it takes part in ends first: its workers are in the trainer's group until then.
        """
        frozen = slot.state is not EngineState.SERVING
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
        """Wait for an engine that answers, or waits for a restart, where engines may join; return whether there is."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while self.newcomers and not (self.alive() or self.dead()):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    async def change(self) -> None:
        """Wait until an engine joins, leaves, dies, or serves or pauses with other weights."""
        await self._changed.wait()

    async def until_joined(self, count: int) -> None:
        """Wait until so many engines have joined."""
        while sum(slot.joined for slot in self.slots) < count:
            await self._changed.wait()

    # ------------------------------------------------------------------ routing
    async def serving(self, session: str | None = None) -> EngineSlot:
        """Choose the engine for a request: the one of its session, else the one with the fewest requests.

        Raises EngineError when none serves within ``wait_s``, or none ever will.
        """
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while not (candidates := [slot for slot in self.slots if slot.state is EngineState.SERVING]):
            if not self.newcomers and all(slot.state is EngineState.DROPPED for slot in self.slots):
                raise EngineError(f"no engine is left: {self.describe()}")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(f"no engine served within {self.wait_s:g} s: {self.describe()}") from None
        if session is None:
            return min(candidates, key=lambda slot: len(slot.in_flight))
        slot = self._sessions.get(session)
        if slot not in candidates:
            slot = min(candidates, key=lambda slot: len(slot.in_flight))
        self._sessions[session] = slot
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)
        return slot

    async def fixed(self, key: str) -> EngineSlot:
        """Choose the engine that a key always goes to while the same engines serve."""
        await self.serving()
        candidates = [slot for slot in self.slots if slot.state is EngineState.SERVING]
        return candidates[zlib.crc32(key.encode()) % len(candidates)]

    async def all_serving(self) -> list[EngineSlot]:
        """List every engine that serves, at least one, in order."""
        await self.serving()
        return [slot for slot in self.slots if slot.state is EngineState.SERVING]

    def describe(self) -> str:
        """Describe the state of every engine in a line."""
        described = (
            f"{slot.name} {slot.state.value} at version {slot.version}" + (f" ({slot.why})" if slot.why else "")
            for slot in self.slots
        )
        return "; ".join(described) or "there is none"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def same_failure(one: str, other: str) -> bool:
    """Return whether two failures read alike but for numbers: process ids, addresses, times.

    A failure quotes what its processes said until it was noticed: the same one may have a line more of what followed.
    """
    lines, others = ({line.strip() for line in _NUMBER.sub("#", text).splitlines()} for text in (one, other))
    return bool(lines and others) and (lines <= others or others <= lines)


def shares(count: int, engines: int) -> Iterator[range]:
    """Deal ``count`` requests out to ``engines`` in turn; yield the numbers of each engine's requests."""
    return (range(number, count, engines) for number in range(engines))
