"""Calls to trainer ranks and engines that need each other: made together, with deadlines, and with one to blame."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron import spans
from skyrl_megatron.errors import EngineError, EngineGoneError, RankLostError, WeightSyncError
from skyrl_megatron.inference.pool import EngineSlot
from skyrl_megatron.inference.protocol import InferenceEngine
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.routes import Holdings
from skyrl_megatron.workers.actor_group import GRACE_S

if TYPE_CHECKING:
    from skyrl_megatron.runtime.offload import Part
    from skyrl_megatron.weight_sync.exchange import Exchange
    from skyrl_megatron.weight_sync.transport import GroupMember

log = logging.getLogger(__name__)
type _Failed = dict[int, tuple[float, Exception]]
"""Rank → (seconds until it failed, error), in the order in which they did."""
ANSWER_S = 30.0
"""How long an engine may take to show that it is alive after a failure."""
LATER_S = 5.0
"""By which callers give up later than those they call."""


class TrainerRank(Protocol):
    """One rank of the policy, wherever it runs. All ranks get every call at the same time."""

    async def weight_metadata(self) -> Sequence[TensorMeta]:
        """List what the rank sends; nothing for a rank that sends nothing."""

    async def listen_for_engines(self) -> tuple[str, int]:
        """Take an address for this rank's group (``WeightSender.listen``)."""

    async def connect_engines(self, receivers: int, timeout_s: float) -> None:
        """Open a group of its own at that address, where every worker gets all that the rank sends
        (``WeightSender.connect``)."""

    async def join_engines(self, member: GroupMember, timeout_s: float, sizes: Sequence[int]) -> list[float]:
        """Join a group, where every worker gets its own part (``WeightSender.join``)."""

    async def weight_holdings(self) -> Holdings | str:
        """List what the rank holds, for a plan of routes, or why there can be none (``WeightSender.holdings``)."""

    async def take_route(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: Exchange | None = None
    ) -> None:
        """Send by a plan of routes from now on (``WeightSender.take_route``). ``exchange``: where ranks share GPUs
        with engines of several nodes."""

    async def send_weights(self, adapters: Sequence[str] | None = None) -> list[Any]:
        """Send the weights, or these adapters; return the checksum of each bucket (``WeightSender.send``)."""

    async def score(
        self, token_ids: Sequence[int], *, perturbation: float = 0.0, adapter: str = ""
    ) -> list[float] | None:
        """Return log-probs of tokens 1 … n−1 at temperature 1, nats, on a rank that has them; None on the others.

        ``perturbation``: relative change of every embedding first (``runtime/scoring.py``). ``adapter``: with which of
        several, by name."""

    async def offload(self, parts: Sequence[Part]) -> None:
        """Free the GPU memory of parts that engines on the same GPUs need; they come back when the rank needs them.
        Called only if they share GPUs."""


class EnginesLost(Exception):
    """Engines that do not answer, or whose weights are wrong: only a restart helps."""

    def __init__(self, phase: str, causes: Mapping[EngineSlot, str]) -> None:
        super().__init__("; ".join(f"{slot.name}, phase {phase}: {why}" for slot, why in causes.items()))
        self.causes = dict(causes)


class EnginesDisagree(EnginesLost):
    """Engines whose log-probs are not the trainer's, although every byte arrived."""


class AttemptFailed(Exception):
    """The sync went wrong although every engine answers, as when bytes arrived that were not sent."""


class _NoAnswer(EngineError):
    """Only a deadline ended the call."""


class SyncCalls:
    """Calls of one sync after another. ``phase_s``: the longest that any may take, also the wait of one rank for
    another; ``ends``: when the sync under way must be over (``time.monotonic``). ``look``: called when ranks do not
    answer; returns what the message says of it. ``end_waiting``: called when ranks or engines wait for a rank that
    failed, with what it said; ends all ranks that are of no more use."""

    def __init__(
        self,
        ranks: Sequence[TrainerRank],
        phase_s: float,
        look: Callable[[], str] = lambda: "",
        end_waiting: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.ranks, self.phase_s, self.look, self.end_waiting = list(ranks), phase_s, look, end_waiting
        self.ends = 0.0

    async def on_engines(
        self,
        slots: Sequence[EngineSlot],
        phase: str,
        call: Callable[[InferenceEngine], Awaitable[Any]],
        within_s: float | None = None,
    ) -> list[Any]:
        """Call all engines; return their results. ``within_s``: where they have less time than a phase may take."""
        return (await self.together(slots, phase, call, None, within_s))[0]

    async def on_ranks(self, phase: str, call: Callable[[TrainerRank], Awaitable[Any]]) -> list[Any]:
        """Call all ranks; return their results."""
        return (await self.together([], phase, None, lambda _, rank: call(rank)))[1]

    async def together(
        self,
        slots: Sequence[EngineSlot],
        phase: str,
        of_engine: Callable[[InferenceEngine], Awaitable[Any]] | None,
        of_rank: Callable[[int, TrainerRank], Awaitable[Any]] | None,
        within_s: float | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Call engines and ranks at the same time; return the results of both. A rank that fails makes those that wait
        for it fail too, or they are left after :data:`GRACE_S`: raises what explains all. ``within_s``: as for
        :meth:`on_engines`."""
        began = time.monotonic()
        failed: _Failed = {}

        async def on_rank(number: int, work: Awaitable[Any]) -> Any:
            try:
                return await self.within(work, within_s)
            except Exception as error:
                failed[number] = time.monotonic() - began, error
                raise

        work = [self._timed(slot.name, phase, of_engine(slot.engine), within_s) for slot in slots] if of_engine else []
        if of_rank:
            work += [on_rank(number, of_rank(number, rank)) for number, rank in enumerate(self.ranks)]
        results = await self._results([asyncio.ensure_future(each) for each in work], failed)
        of_engines, of_ranks = results[: len(slots)], results[len(slots) :]
        lost = {slot: str(e) for slot, e in zip(slots, of_engines, strict=True) if isinstance(e, BaseException)}
        if lost or failed:
            raise await self._explanation(phase, lost, failed)
        return list(of_engines), list(of_ranks)

    async def _results(self, calls: Sequence[asyncio.Future[Any]], failed: _Failed) -> list[Any]:
        """Return results and errors of all calls; those that are left because a rank failed are cancelled."""
        waiting = set(calls)
        try:
            while waiting and not self._own(failed):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                _, waiting = await asyncio.wait(waiting, timeout=GRACE_S)
            if waiting and (error := self._own(failed)):
                await asyncio.to_thread(self.end_waiting, error)
        finally:
            for call in waiting:
                call.cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    def _own(self, failed: _Failed) -> Exception | None:
        """Return a rank's own error, raised before it would have given up: that of a process that is gone first."""
        errors = [e for after, e in failed.values() if after < self.phase_s and not isinstance(e, EngineError)]
        return min(errors, key=lambda error: not isinstance(error, RankLostError), default=None)

    async def _explanation(self, phase: str, engines: Mapping[EngineSlot, str], ranks: _Failed) -> BaseException:
        """Return a rank's own error as it is, that of a process that is gone first; else EnginesLost, for those that
        do not answer; else WeightSyncError, for ranks that do not; else what a rank said that waited for another one
        to the end; else nobody is to blame (AttemptFailed)."""
        if own := self._own(ranks):
            return own
        if silent := {slot: why for slot, why in engines.items() if not await self._answers(slot)}:
            return EnginesLost(phase, silent)
        if mute := {number: error for number, (_, error) in sorted(ranks.items()) if isinstance(error, _NoAnswer)}:
            names = ", ".join(f"trainer rank {number}" for number in mute)
            noted = await asyncio.to_thread(self.look)
            why = next(iter(mute.values()))
            return WeightSyncError(f"{names}, phase {phase}: {why} (trainer.phase_timeout_s){noted}")
        if late := [error for _, error in ranks.values() if not isinstance(error, EngineError)]:
            return late[0]
        told = [f"{slot.name}, phase {phase}: {why}" for slot, why in engines.items()]
        told += [f"trainer rank {number}, phase {phase}: {error}" for number, (_, error) in sorted(ranks.items())]
        return AttemptFailed("; ".join(told))

    async def within(self, work: Awaitable[Any], within_s: float | None = None) -> Any:
        """Await with the deadlines of the phase and of the sync; :data:`LATER_S` more than the callee's own, whose
        error says more. Raises EngineError."""
        most = self.phase_s if within_s is None else min(within_s, self.phase_s)
        left = max(min(most, self.ends - time.monotonic()), 0.0) + LATER_S
        try:
            async with asyncio.timeout(left):
                return await work
        except TimeoutError:
            raise _NoAnswer(f"no answer within {round(left, 1):g} s") from None

    async def _timed(self, lane: str, phase: str, work: Awaitable[Any], within_s: float | None) -> Any:
        with spans.span(lane, phase):
            return await self.within(work, within_s)

    async def _answers(self, slot: EngineSlot) -> bool:
        try:
            await slot.probe(min(self.phase_s, ANSWER_S))
        except EngineGoneError as error:
            log.info("%s does not answer: %s", slot.name, error)
            return False
        return True
