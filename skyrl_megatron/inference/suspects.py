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


class AdmittingEngine(Protocol):
    """What is needed of an :class:`~skyrl_megatron.inference.pool.EngineSlot`."""

    admitting: asyncio.Lock
    why: str

    async def run[T](self, work: Awaitable[T]) -> T:
        """Await a request. Raises EngineGoneError when the engine is lost."""

    async def probe(self, timeout_s: float) -> str:
        """Return once the engine has answered. Raises EngineGoneError."""


class Suspects:
    """Content of requests that were lost with an engine, and of those that ended a second one.

    A suspect is given to an engine while no other suspect is being given to it, until the engine was seen to live on
    with it. An engine that is lost before that was ended by this request, which is refused from then on. So one
    request costs two engines at most, and those beside it are made again.
    """

    def __init__(self) -> None:
        self._suspected: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def suspects(self, content: tuple[Any, ...]) -> bool:
        """Return whether a request of this content was lost. Raises RequestError for one that ended two engines."""
        if not self._suspected and not self._refused:
            return False
        key = _key(content)
        if key in self._refused:
            raise RequestError(self._refused[key])
        return key in self._suspected

    def suspect(self, content: tuple[Any, ...]) -> None:
        """Note that a request was in flight when an engine was lost."""
        _remember(self._suspected, _key(content), None)

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


async def proven[T](slot: AdmittingEngine, work: Callable[[], Awaitable[T]]) -> T:
    """Await a suspect's answer, alone among suspects until the engine was seen to live on with it.

    Raises :class:`EndedByRequest` when the engine is lost before that, EngineGoneError when it is lost later,
    :class:`NotGiven` when it was lost with the suspect before this one.
    """
    async with slot.admitting:
        if slot.why:
            raise NotGiven(slot.why)
        request = asyncio.ensure_future(slot.run(work()))
        proof = asyncio.ensure_future(_lives_on(slot))
        try:
            await asyncio.wait([request, proof], return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and proof.exception() is not None:
                request.cancel()
                await asyncio.wait([request])
                raise EndedByRequest(str(proof.exception()))
            if request.done() and isinstance(error := _error_of(request), EngineGoneError):
                raise EndedByRequest(str(error)) from error
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
    """An engine was lost before a request was given to it."""


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
