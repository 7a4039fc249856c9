"""Sample from several engines as if they were one. A dead or hung engine is noticed, its requests go to others, and it
is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from skyrl_megatron.errors import EngineError, EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.pool import (
    EndedByRequest,
    EnginePool,
    EngineSlot,
    EngineState,
    NotGiven,
    proven,
    same_failure,
    shares,
)
from skyrl_megatron.inference.protocol import Generation, OpenAIAnswer, SampleRequest

log = logging.getLogger(__name__)
HOUR_S = 3600.0
SILENT_S = 60.0
"""How long an engine may be silent: longer than any of its steps takes."""


class HealthMonitor:
    """Asks every engine every ``interval_s``; one that fails, or does not answer within ``timeout_s``, is killed and
    restarted, or dropped if it was ``restarts_per_hour`` times within the last hour.

    A probe goes through the engine's core to every worker and back, and finds processes that died. It waits for the
    engine's current step, so ``timeout_s`` must be longer than any step; a process that is stopped is told apart from
    a long step, and noticed within 10 s (:mod:`~skyrl_megatron.inference.vllm.processes`).
    ``sync_engine(slot)`` gives a restarted engine the published weights; without it such an engine stays paused
    until the next sync.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        interval_s: float = 3.0,
        timeout_s: float = SILENT_S,
        restarts_per_hour: int = 3,
        sync_engine: Callable[[EngineSlot], Awaitable[None]] | None = None,
    ) -> None:
        self.pool, self.interval_s, self.timeout_s = pool, interval_s, timeout_s
        self.restarts_per_hour, self.sync_engine = restarts_per_hour, sync_engine
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, str] = {}  # why engines stay paused, by their names

    def start(self) -> None:
        """Watch in the background."""
        self._task = asyncio.create_task(self._watch(), name="engine health")

    async def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.check()
            except Exception:  # without a watch the next dead engine would hold up its requests for long
                log.exception("looking after the engines failed, tried again in %g s", self.interval_s)

    async def check(self) -> None:
        """Probe every engine once and restart those that are dead. Waits while a sync is under way; engines that sleep
        are left to the sync that will wake them."""
        async with self.pool.changing:
            if self.pool.asleep:
                return
            going = (EngineState.DROPPED, EngineState.LEAVING)
            watched = [slot for slot in self.pool.slots if slot.state not in going]
            await asyncio.gather(*(self._probe(slot) for slot in watched))
            dead = [slot for slot in watched if slot.state is EngineState.DEAD]
            await asyncio.gather(*(self._restart(slot) for slot in dead))
            if self.sync_engine is not None:
                for slot in self.pool.alive():
                    if slot.version != self.pool.published:
                        await self._update(slot, self.sync_engine)

    async def _probe(self, slot: EngineSlot) -> None:
        if slot.state is EngineState.DEAD:
            return
        try:
            version = await slot.probe(self.timeout_s)
        except EngineGoneError as error:
            await self._mark_dead(slot, str(error))
        else:
            if version != slot.version or slot.state is EngineState.PAUSED:
                self.pool.serve(slot, version)  # if it was only suspected; it stays paused with other weights

    async def _mark_dead(self, slot: EngineSlot, why: str) -> None:
        lost = len(slot.in_flight)
        await self.pool.mark_dead(slot, why)
        log.warning("%s %s; its %d requests go to other engines", slot.name, why, lost)

    async def _restart(self, slot: EngineSlot) -> None:
        recent = sum(time.monotonic() - then < HOUR_S for then in slot.restarts)
        if recent >= self.restarts_per_hour:
            why = f"{slot.why}, after {recent} restarts within an hour (generator.inference_engine.restarts_per_hour)"
            await self.pool.mark_dead(slot, why, EngineState.DROPPED)
            log.error("%s is dropped: %s", slot.name, slot.why)
            return
        try:
            await self.pool.restart(slot)
            log.warning("%s was restarted (%d of %d within an hour)", slot.name, recent + 1, self.restarts_per_hour)
        except EngineError as error:
            if same_failure(str(error), slot.why):
                await self.pool.drop(slot, f"a restart changes nothing: {error}")
                log.error("%s is dropped: %s", slot.name, slot.why)
                return
            slot.why, slot.state = str(error), EngineState.DEAD
            log.warning("%s could not be restarted: %s", slot.name, error)

    async def _update(self, slot: EngineSlot, sync_engine: Callable[[EngineSlot], Awaitable[None]]) -> None:
        try:
            await sync_engine(slot)
        except SkyRLMegatronError as error:
            if self._told.get(slot.name) != str(error):  # the same every time, until the next sync
                log.warning("%s stays paused, its weights could not be updated: %s", slot.name, error)
            self._told[slot.name] = str(error)
        else:
            self._told.pop(slot.name, None)


type Request = tuple[Sequence[int], Mapping[str, Any], str]
"""(prompt, sampling parameters, adapter)."""


type Content = tuple[Any, ...]
"""What makes one request like another: all but its seed and id."""


class InferenceClient:
    """Routes requests to the engines of a pool, bounds how many are in flight, and retries what a dead engine lost.

    A retry starts over under a new id on an engine that serves; what the lost attempt may still return is discarded,
    so every request yields one continuation. A request that was lost with two engines, the second of which it ended,
    is refused (:class:`~skyrl_megatron.inference.pool.Suspects`). ``deterministic``: a batch is dealt out to the
    engines in turn and each engine gets its share at once and in order, so that it forms the same batches in every
    run; requests should carry seeds (:func:`~skyrl_megatron.inference.sampling_params.request_seed`).
    """

    def __init__(
        self, pool: EnginePool, *, max_in_flight: int = 4096, retries: int = 3, deterministic: bool = False
    ) -> None:
        """``max_in_flight``: requests per engine."""
        self.pool, self.retries, self.deterministic = pool, retries, deterministic
        self._room = _Room(pool, max_in_flight)
        self._prefix, self._numbers = uuid.uuid4().hex[:8], itertools.count()

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Sample one continuation for each prompt, in order.

        ``sampling_params``: keys of vLLM's ``SamplingParams``, for all or one mapping for each. ``session_ids``:
        requests of a session go to the engine that has its prefix. ``adapters``: which of several samples each.
        Raises RequestError for a prompt, key or adapter that no engine takes, EngineError when no engine is left.
        """
        count = len(prompt_token_ids)
        each = [sampling_params] * count if isinstance(sampling_params, Mapping) else list(sampling_params)
        given = [len(each), *(len(some) for some in (session_ids, adapters) if some is not None)]
        if given != [count] * len(given):
            raise ValueError(f"{count} prompts; sampling_params, session_ids, adapters that are given: {given}")
        requests = list(zip(prompt_token_ids, each, adapters or [""] * count, strict=True))
        if self.deterministic and count > 1:
            return await self._dealt(requests)
        sessions: Sequence[str | None] = session_ids or [None] * count
        batches = await _all_or_none([self._attempts([r], s) for r, s in zip(requests, sessions, strict=True)])
        return [generation for [generation] in batches]

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        session_id: str | None = None,
        adapter: str = "",
    ) -> Generation:
        """Sample one continuation."""
        [generation] = await self._attempts([(prompt_token_ids, sampling, adapter)], session_id)
        return generation

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of tokens 1 … n−1 by any engine at the published version, nats."""
        return await self._retried(lambda slot: slot.engine.score(token_ids), None)

    async def openai(self, path: str, body: bytes, session_id: str | None = None) -> OpenAIAnswer:
        """Let one engine answer an OpenAI request.

        Retried as long as nothing was answered; a stream that breaks off raises EngineGoneError.
        """
        content = (path, body)
        attempt = 0
        while True:
            answered, suspected = False, self.pool.suspects.suspects(content)
            async with self._room:
                slot = await self.pool.serving(session_id)
                life, pieces = slot.life, slot.engine.openai(path, body)
                try:
                    if suspected and self.pool.suspects.alone(content):
                        for piece in await self._proven(slot, partial(_all_of, pieces), [content]):
                            yield piece
                        self.pool.suspects.clear(content)
                        return
                    if suspected:
                        piece = await self._proven(slot, partial(anext, pieces, None), [content])
                    else:
                        piece = await slot.run(anext(pieces, None))
                    while piece is not None:
                        answered = True
                        yield piece
                        piece = await slot.run(anext(pieces, None))
                    self.pool.suspects.clear(content)
                    return
                except NotGiven:
                    pass
                except EngineGoneError as error:
                    self._lost(slot, life, error, [content])
                    if answered or attempt >= self.retries:
                        raise
                    attempt += 1
                finally:
                    with contextlib.suppress(EngineGoneError):
                        await pieces.aclose()

    # ------------------------------------------------------------------ attempts
    async def _dealt(self, requests: Sequence[Request]) -> list[Generation]:
        slots = await self.pool.all_serving()
        dealt = list(shares(len(requests), len(slots)))
        batches = [
            self._attempts([requests[number] for number in share], None, slot)
            for share, slot in zip(dealt, slots, strict=True)
            if share
        ]
        out: list[Any] = [None] * len(requests)
        for share, batch in zip(dealt, await _all_or_none(batches), strict=False):
            for number, generation in zip(share, batch, strict=True):
                out[number] = generation
        return out

    async def _attempts(
        self, share: Sequence[Request], session: str | None, first: EngineSlot | None = None
    ) -> list[Generation]:
        """Sample continuations of requests that go to one engine together, each by itself once it was lost."""

        async def attempt(slot: EngineSlot) -> list[Generation]:
            requests = [SampleRequest(f"{self._prefix}-{next(self._numbers)}", *one) for one in share]
            if len(requests) == 1:
                [one] = requests
                named = {"adapter": one.adapter} if one.adapter else {}  # an engine of a plugin may know none
                answers = [await slot.engine.generate(one.request_id, one.prompt_token_ids, one.sampling, **named)]
            else:
                answers = await slot.engine.generate_batch(requests)
            for generation in answers:
                if not await self.pool.published_soon(generation):
                    raise _Unpublished(
                        f"{slot.name} generated with weights {generation.versions}, published is {self.pool.published}"
                    )
            return answers

        contents = [_content(one) for one in share]
        if len(share) > 1:
            if not any([self.pool.suspects.suspects(content) for content in contents]):
                with contextlib.suppress(_LostTogether):
                    return await self._retried(attempt, session, first, contents)
            return [one for [one] in await _all_or_none([self._attempts([each], session) for each in share])]
        return await self._retried(attempt, session, first, contents)

    async def _retried[T](
        self,
        attempt: Callable[[EngineSlot], Awaitable[T]],
        session: str | None,
        first: EngineSlot | None = None,
        contents: Sequence[Content] = (),
    ) -> T:
        number, lost = 0, None
        while number <= self.retries:
            suspected = any([self.pool.suspects.suspects(content) for content in contents])
            async with self._room:
                if number == 0 and first is not None:
                    slot = first
                elif self.deterministic and session is not None:
                    slot = await self.pool.fixed(session)
                else:
                    slot = await self.pool.serving(session)
                life = slot.life
                try:
                    if suspected:
                        answer = await self._proven(slot, partial(attempt, slot), contents)
                    else:
                        answer = await slot.run(attempt(slot))
                    for content in contents:
                        self.pool.suspects.clear(content)
                    return answer
                except NotGiven:
                    first = None
                except EngineGoneError as error:
                    lost = error
                    number += 1
                    if self._lost(slot, life, error, contents) and len(contents) > 1:
                        raise _LostTogether(str(error)) from error
        raise EngineError(f"a request was lost {number} times, last: {lost}") from lost

    def _proven[T](
        self, slot: EngineSlot, work: Callable[[], Awaitable[T]], contents: Sequence[Content]
    ) -> Awaitable[T]:
        suspects = self.pool.suspects
        return proven(
            slot,
            work,
            suspected=lambda: any([suspects.suspects(content) for content in contents]),
            alone=lambda: any(suspects.alone(content) for content in contents),
        )

    def _lost(
        self, slot: EngineSlot, life: tuple[str, int], error: EngineGoneError, contents: Sequence[Content]
    ) -> bool:
        """Send nothing more to an engine that lost requests, until it was probed; return whether they may have ended
        it. Raises RequestError for a request that did."""
        leaves = slot.state is EngineState.LEAVING
        self._suspect(slot)
        if isinstance(error, EndedByRequest) and len(contents) == 1:
            [content] = contents
            raise self.pool.suspects.refuse(
                content,
                f"the request ended two engines, and is not given to another: {_described(content)}; {slot.name}, the "
                f"second: {error}",
            ) from error
        if leaves or isinstance(error, _Unpublished):
            return False
        for content in contents:
            self.pool.suspects.suspect(content, life)
        return True

    def _suspect(self, slot: EngineSlot) -> None:
        """Send nothing more to an engine that lost a request, until it was probed."""
        self.pool.pause(slot)
        slot.why = slot.why or "lost a request"


class _Unpublished(EngineGoneError):
    """An engine answered with weights that are not published."""


class _LostTogether(EngineGoneError):
    """Requests were lost that an engine was given together."""


class _Room:
    """Room for ``per_engine`` requests for each engine of a pool, however many there are at the time."""

    def __init__(self, pool: EnginePool, per_engine: int) -> None:
        self.pool, self.per_engine = pool, per_engine
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        while self._free() <= 0:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._call()  # the turn may have been this one's
                raise
        self._used += 1

    async def __aexit__(self, *_: object) -> None:
        self._used -= 1
        self._call()

    def _free(self) -> int:
        return self.per_engine * max(len(self.pool.slots), 1) - self._used

    def _call(self) -> None:
        """Let as many go on as there is room for."""
        called = 0
        while self._waiting and called < self._free():
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                called += 1


async def _all_of(pieces: OpenAIAnswer) -> list[Any]:
    return [piece async for piece in pieces]


def _content(request: Request) -> Content:
    prompt, sampling, adapter = request
    return prompt, {key: sampling[key] for key in sorted(sampling) if key != "seed"}, adapter


def _described(content: Content) -> str:
    """Return a line about a request that was refused."""
    if len(content) == 2:
        path, body = content
        return f"POST {path} of {len(body)} bytes, {body[:200]!r}"
    prompt, sampling, _ = content
    return f"{len(prompt)} tokens from {prompt[:8]}, sampling parameters {str(sampling)[:300]}"


async def _all_or_none(work: Sequence[Any]) -> list[Any]:
    """Await all; when one fails the others are cancelled, so that nothing runs on unawaited."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
