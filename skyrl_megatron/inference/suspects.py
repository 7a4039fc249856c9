"""Requests that were in flight when an engine was lost: which of them ended it, and which had bad luck."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from skyrl_megatron.errors import EngineGoneError, RequestError

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
