"""Sample from several engines as if they were one.

The health monitor finds dead or hung engines and restarts them. The client retries their requests on other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from skyrl_megatron.errors import EngineError, EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.engine_pool import (
    LOGS,
    EnginePool,
    EngineSlot,
    EngineState,
    KilledByRequest,
    NotSubmitted,
    run_suspect,
    same_failure,
    shares,
)
from skyrl_megatron.inference.protocol import Generation, OpenAIAnswer, SampleRequest

log = logging.getLogger(__name__)
HOUR_S = 3600.0
SILENT_S = 60.0
"""Deadline of a health probe. It must be longer than any step of an engine."""


class HealthMonitor:
    """Probes every engine every ``interval_s`` and restarts those that fail or do not answer within ``timeout_s``.

    An engine that was restarted ``restarts_per_hour`` times within the last hour is dropped instead. A probe goes
    through the engine core to every worker and back. It waits for the engine's current step, so ``timeout_s`` must be
    longer than any step. A stopped process (SIGSTOP) is detected within 10 s
    (:mod:`~skyrl_megatron.inference.vllm.processes`). ``sync_engine(slot)`` gives a restarted engine the published
    weights. Without it, such an engine stays paused until the next sync.
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
        self._reported: dict[str, str] = {}  # engine name → logged reason why it stays paused

    def start(self) -> None:
        """Start probing in the background."""
        self._task = asyncio.create_task(self._watch(), name="engine health")

    async def stop(self) -> None:
        """Stop probing."""
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
            except Exception:  # keep probing: without the monitor, requests to dead engines would wait for long
                log.exception("the health check of the engines failed; retrying in %g s", self.interval_s)

    async def check(self) -> None:
        """Probe every engine once and restart dead ones. Wait for a running sync first. Skip sleeping engines."""
        async with self.pool.changing:
            if self.pool.asleep:
                return
            unused = (EngineState.DROPPED, EngineState.LEAVING)
            slots = [slot for slot in self.pool.slots if slot.state not in unused]
            await asyncio.gather(*(self._probe(slot) for slot in slots))
            dead = [slot for slot in slots if slot.state is EngineState.DEAD]
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
                self.pool.serve(slot, version)  # it lost a request but is alive; with other weights it stays paused

    async def _mark_dead(self, slot: EngineSlot, why: str) -> None:
        lost = len(slot.in_flight)
        await self.pool.mark_dead(slot, why)
        log.warning("%s %s; its %d requests move to other engines", slot.name, why, lost)

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
                await self.pool.drop(slot, f"it failed in the same way after a restart: {error}")
                log.error("%s is dropped: %s", slot.name, slot.why)
                return
            slot.why, slot.state = str(error), EngineState.DEAD
            log.warning("%s could not be restarted: %s", slot.name, error)

    async def _update(self, slot: EngineSlot, sync_engine: Callable[[EngineSlot], Awaitable[None]]) -> None:
        try:
            await sync_engine(slot)
        except SkyRLMegatronError as error:
            if self._reported.get(slot.name) != str(error):  # log a repeated error once
                log.warning("%s stays paused: its weights could not be updated: %s", slot.name, error)
            self._reported[slot.name] = str(error)
        else:
            self._reported.pop(slot.name, None)


type Request = tuple[Sequence[int], Mapping[str, Any], str]
"""(prompt, sampling parameters, adapter)."""


type Content = tuple[Any, ...]
"""All of a request except its seed and id. Requests with equal content are treated as the same."""


class InferenceClient:
    """Routes requests to the engines of a pool, limits how many are in flight, and retries those of a dead engine.

    A retry starts over with a new id on a serving engine. A late answer to the lost attempt is discarded, so every
    request has one continuation. A request that kills engines is rejected
    (:class:`~skyrl_megatron.inference.engine_pool.SuspectRequests`). ``deterministic``: a batch is distributed
    round-robin, and each engine gets its share at once and in order, so that it forms the same batches in every run.
    Requests should then have seeds (:func:`~skyrl_megatron.inference.sampling_params.request_seed`).
    """

    def __init__(
        self, pool: EnginePool, *, max_in_flight: int = 4096, retries: int = 3, deterministic: bool = False
    ) -> None:
        """``max_in_flight``: limit per engine."""
        self.pool, self.retries, self.deterministic = pool, retries, deterministic
        self._limit = _InFlightLimit(pool, max_in_flight)
        self._prefix, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._sampling: dict[str, tuple[EngineSlot, str]] = {}
        """Session → (engine, id) of its request that an engine is sampling."""
        self._answers, self._answer_tokens = 0, 0

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Sample one continuation for each prompt, in order.

        ``sampling_params``: keys of vLLM's ``SamplingParams``, one mapping for all prompts or one for each.
        ``session_ids``: requests of a session go to the engine that has cached its prefix. ``adapters``: the adapter
        of each prompt, if there are several. Raises RequestError for an invalid prompt, key or adapter, and
        EngineError if no engine is left.
        """
        count = len(prompt_token_ids)
        samplings = [sampling_params] * count if isinstance(sampling_params, Mapping) else list(sampling_params)
        lengths = [len(samplings), *(len(some) for some in (session_ids, adapters) if some is not None)]
        if lengths != [count] * len(lengths):
            raise ValueError(f"{count} prompts, but sampling_params, session_ids, adapters have lengths {lengths}")
        requests = list(zip(prompt_token_ids, samplings, adapters or [""] * count, strict=True))
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

    async def abort(self, session_ids: Sequence[str]) -> None:
        """Abort the requests of sessions that engines are sampling. They return the tokens that they have, with
        ``finish_reason`` ``abort``."""
        found = [self._sampling[session] for session in session_ids if session in self._sampling]

        async def one(slot: EngineSlot, request_id: str) -> None:
            with contextlib.suppress(EngineGoneError):  # its requests are retried
                await slot.engine.abort(request_id)

        await _all_or_none([one(slot, request_id) for slot, request_id in found])

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of tokens 1 … n−1 in nats, from an engine with the published version."""
        return await self._retried(lambda slot: slot.engine.score(token_ids), None)

    async def openai(self, path: str, body: bytes, session_id: str | None = None) -> OpenAIAnswer:
        """Let one engine answer an OpenAI request. Raises EngineGoneError if a stream breaks off.

        The request is retried as long as no part of the answer has been yielded.
        """
        content = (path, body)
        attempt = 0
        while True:
            answered, suspected = False, self.pool.suspects.suspects(content)
            async with self._limit:
                slot = await self.pool.serving(session_id)
                life, pieces = slot.life, slot.engine.openai(path, body)
                try:
                    if suspected and self.pool.suspects.alone(content):
                        for piece in await self._run_suspect(slot, partial(_all_of, pieces), [content]):
                            yield piece
                        self.pool.suspects.clear(content)
                        return
                    if suspected:
                        piece = await self._run_suspect(slot, partial(anext, pieces, None), [content])
                    else:
                        piece = await slot.run(anext(pieces, None))
                    while piece is not None:
                        answered = True
                        yield piece
                        piece = await slot.run(anext(pieces, None))
                    self.pool.suspects.clear(content)
                    return
                except NotSubmitted:
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
        """Sample requests together on one engine. After a loss, retry each one separately."""

        async def attempt(slot: EngineSlot) -> list[Generation]:
            requests = [SampleRequest(f"{self._prefix}-{next(self._numbers)}", *one) for one in share]
            if len(requests) == 1:
                [one] = requests
                named = (
                    {"adapter": one.adapter} if one.adapter else {}
                )  # a plugin's engine may not have this parameter
                with self._noted(session, slot, one.request_id):
                    answers = [await slot.engine.generate(one.request_id, one.prompt_token_ids, one.sampling, **named)]
            else:
                answers = await slot.engine.generate_batch(requests)
            for generation in answers:
                self._answers, self._answer_tokens = self._answers + 1, self._answer_tokens + len(generation.token_ids)
                if not await self.pool.published_soon(generation):
                    raise _Unpublished(
                        f"{slot.name} sampled with weights {generation.versions}, published is {self.pool.published}"
                    )
            return answers

        contents, load = [_content(one) for one in share], sum(map(self._predicted_tokens, share))
        if len(share) > 1:
            if not any([self.pool.suspects.suspects(content) for content in contents]):
                with contextlib.suppress(_LostTogether):
                    return await self._retried(attempt, session, first, contents, load)
            return [one for [one] in await _all_or_none([self._attempts([request], session) for request in share])]
        return await self._retried(attempt, session, first, contents, load)

    def _predicted_tokens(self, request: Request) -> int:
        """Return the KV cache that a request is predicted to need, in tokens: an answer of average length."""
        prompt, sampling, _ = request
        most = sampling.get("max_tokens") or self._answer_tokens
        average = self._answer_tokens // self._answers if self._answers else most
        return len(prompt) + min(average, most)

    @contextlib.contextmanager
    def _noted(self, session: str | None, slot: EngineSlot, request_id: str) -> Iterator[None]:
        """Note that an engine samples a request of a session."""
        if session is not None:
            self._sampling[session] = slot, request_id
        try:
            yield
        finally:
            if session is not None and self._sampling.get(session) == (slot, request_id):
                del self._sampling[session]

    async def _retried[T](
        self,
        attempt: Callable[[EngineSlot], Awaitable[T]],
        session: str | None,
        first: EngineSlot | None = None,
        contents: Sequence[Content] = (),
        load: int = 0,
    ) -> T:
        number, lost = 0, None
        while number <= self.retries:
            suspected = any([self.pool.suspects.suspects(content) for content in contents])
            async with self._limit:
                if number == 0 and first is not None:
                    slot = first
                elif self.deterministic and session is not None:
                    slot = await self.pool.fixed(session)
                else:
                    slot = await self.pool.serving(session)
                life = slot.life
                try:
                    if suspected:
                        answer = await self._run_suspect(slot, partial(attempt, slot), contents)
                    else:
                        answer = await slot.run(attempt(slot), load)
                    for content in contents:
                        self.pool.suspects.clear(content)
                    return answer
                except NotSubmitted:
                    first = None
                except EngineGoneError as error:
                    lost = error
                    number += 1
                    if self._lost(slot, life, error, contents) and len(contents) > 1:
                        raise _LostTogether(str(error)) from error
        raise EngineError(f"a request was lost {number} times; the last error: {lost}; {LOGS}") from lost

    def _run_suspect[T](
        self, slot: EngineSlot, work: Callable[[], Awaitable[T]], contents: Sequence[Content]
    ) -> Awaitable[T]:
        suspects = self.pool.suspects
        return run_suspect(
            slot,
            work,
            suspected=lambda: any([suspects.suspects(content) for content in contents]),
            alone=lambda: any(suspects.alone(content) for content in contents),
        )

    def _lost(
        self, slot: EngineSlot, life: tuple[str, int], error: EngineGoneError, contents: Sequence[Content]
    ) -> bool:
        """Send no more requests to an engine that lost some, until it is probed. Return whether they are suspects.

        Raises RequestError for a request that killed the engine.
        """
        leaves = slot.state is EngineState.LEAVING
        self._suspect(slot)
        if isinstance(error, KilledByRequest) and len(contents) == 1:
            [content] = contents
            raise self.pool.suspects.refuse(
                content,
                f"the request killed two engines and is not retried: {_described(content)}; error of the second, "
                f"{slot.name}: {error}",
            ) from error
        if leaves or isinstance(error, _Unpublished):
            return False
        for content in contents:
            self.pool.suspects.suspect(content, life)
        return True

    def _suspect(self, slot: EngineSlot) -> None:
        """Send no more requests to an engine that lost one, until it is probed."""
        self.pool.pause(slot)
        slot.why = slot.why or "lost a request"


class _Unpublished(EngineGoneError):
    """An engine sampled with weights that are not published."""


class _LostTogether(EngineGoneError):
    """A batch of requests was lost with an engine."""


class _InFlightLimit:
    """Limits the requests in flight to ``per_engine`` times the current number of engines.

    Requests are admitted in the order in which they came: a free place belongs to the one that waits longest.
    """

    def __init__(self, pool: EnginePool, per_engine: int) -> None:
        self.pool, self.per_engine = pool, per_engine
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        self._admit()
        if not self._waiting and self._free() > 0:
            self._used += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._used -= 1
        self._admit()

    def _free(self) -> int:
        return self.per_engine * max(len(self.pool.slots), 1) - self._used

    def _admit(self) -> None:
        """Give free places to the requests that wait."""
        while self._waiting and self._free() > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._used += 1


async def _all_of(pieces: OpenAIAnswer) -> list[Any]:
    return [piece async for piece in pieces]


def _content(request: Request) -> Content:
    prompt, sampling, adapter = request
    return prompt, {key: sampling[key] for key in sorted(sampling) if key != "seed"}, adapter


def _described(content: Content) -> str:
    """Describe a rejected request in one line."""
    if len(content) == 2:
        path, body = content
        return f"POST {path} with {len(body)} bytes, {body[:200]!r}"
    prompt, sampling, _ = content
    return f"{len(prompt)} tokens starting with {prompt[:8]}, sampling parameters {str(sampling)[:300]}"


async def _all_or_none(work: Sequence[Any]) -> list[Any]:
    """Await all results. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
