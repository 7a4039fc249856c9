"""Calls to trainer ranks and engines that need each other: made together, with deadlines; and their reshard plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from skyrl_megatron import progress as spans
from skyrl_megatron.errors import EngineError, EngineGoneError, RankLostError, WeightSyncError
from skyrl_megatron.inference.pool import EngineSlot
from skyrl_megatron.inference.protocol import InferenceEngine
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.point_to_point import plan_exchange
from skyrl_megatron.weight_sync.reshard_plan import Beside, RoutePlan, join
from skyrl_megatron.weight_sync.slices import Holdings, Parcels, Route, Unroutable, tensors_of
from skyrl_megatron.weight_sync.transport import GroupMember
from skyrl_megatron.workers.actor_group import GRACE_S

if TYPE_CHECKING:
    from skyrl_megatron.runtime.offload import Part
    from skyrl_megatron.weight_sync.point_to_point import Exchange


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

        ``perturbation``: relative change of every embedding first (``runtime/forward_step.py``). ``adapter``: with
        which of several, by name."""

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


NAMED = 4
"""Wrong buckets, and tensors of one, that a message names."""


@dataclass(frozen=True, slots=True)
class WorkerRoutes:
    """A plan for engines, worker after worker."""

    tensors: Sequence[TensorMeta]
    plan: RoutePlan
    workers: Sequence[tuple[EngineSlot, int]]
    """Engine and number in it of each worker of the plan."""
    beside: Beside | None = None
    """The rank on each worker's device, through which it gets everything; None: it gets each bucket from its rank."""

    @property
    def nbytes(self) -> int:
        """Bytes that all workers receive."""
        return sum(parcels.nbytes for parcels in self.plan.workers)

    def of(self, adapters: Collection[str]) -> WorkerRoutes:
        """Return the part that some of the adapters travel by."""
        chosen = np.array([meta.adapter in adapters for meta in self.tensors])

        def part(parcels: Parcels) -> Parcels:
            return Parcels(parcels.buckets[chosen[parcels.buckets[:, 5]]], parcels.copies)

        ranks, workers = (list(map(part, side)) for side in (self.plan.ranks, self.plan.workers))
        return WorkerRoutes(self.tensors, RoutePlan(ranks, workers), self.workers, self.beside)

    def groups(self) -> list[tuple[list[int], list[int]]]:
        """Return the ranks and the workers of each group: one of all that send or receive; or of each rank and the
        worker on its device."""
        if self.beside is not None:
            return [([rank], [worker]) for worker, rank in enumerate(self.beside.ranks)]
        sending = [rank for rank, parcels in enumerate(self.plan.ranks) if len(parcels.buckets)]
        return [(sending, list(range(len(self.workers))))]


class RoutePlanner:
    """Makes plans of buckets of ``bucket_bytes``. What an engine needs is recorded once, for as long as it lives."""

    def __init__(self, calls: SyncCalls, bucket_bytes: int) -> None:
        self.calls, self.bucket_bytes = calls, bucket_bytes
        self._tensors: Sequence[TensorMeta] = ()
        self._recorded: WeakKeyDictionary[InferenceEngine, Sequence[Route]] = WeakKeyDictionary()
        """What each worker of an engine needs of these tensors."""

    async def plan(
        self, slots: Sequence[EngineSlot], rank_of: Callable[[EngineSlot, int], int] | None = None, per_node: int = 1
    ) -> WorkerRoutes | str:
        """Return the plan of a sync of these engines, or why weights cannot travel by routes. ``rank_of``: the rank on
        the device of an engine's worker, where ranks, ``per_node`` of them on each node, exchange weights."""
        holdings = await self.calls.on_ranks("metadata", lambda rank: rank.weight_holdings())
        if why := next((each for each in holdings if isinstance(each, str)), None):
            return why
        try:
            tensors = tensors_of(holdings)
            await self._record(slots, tensors)
            workers = [(slot, number) for slot in slots for number in range(len(self._recorded[slot.engine]))]
            routes = [route for slot in slots for route in self._recorded[slot.engine]]
            beside = None if rank_of is None else Beside([rank_of(*worker) for worker in workers], per_node)
            plan = await asyncio.to_thread(join, tensors, holdings, routes, self.bucket_bytes, beside)
        except Unroutable as error:
            return str(error)
        return WorkerRoutes(tensors, plan, workers, beside)

    async def _record(self, slots: Sequence[EngineSlot], tensors: Sequence[TensorMeta]) -> None:
        if tensors != self._tensors:
            self._tensors, self._recorded = tensors, WeakKeyDictionary()
        new = [slot for slot in slots if slot.engine not in self._recorded]
        answers = await self.calls.on_engines(new, "connect", lambda engine: _routes_of(engine, tensors))
        for slot, answer in zip(new, answers, strict=True):
            if isinstance(answer, str):
                raise Unroutable(f"{slot.name}: {answer}")
            self._recorded[slot.engine] = [Route.of_plain(targets, copies) for targets, copies in answer]


async def _routes_of(engine: InferenceEngine, tensors: Sequence[TensorMeta]) -> list[Any] | str:
    try:
        return await engine.weight_routes(tensors)
    except AttributeError as error:  # an engine of a plugin may leave it out
        return f"it records no routes: {error}"


async def connect_routes(
    calls: SyncCalls,
    slots: Sequence[EngineSlot],
    routes: WorkerRoutes,
    options: dict[str, Any],
    sizes: Sequence[int] = (),
) -> dict[int, float]:
    """Give ranks and workers their parcels, and open the groups of those that send to one another. Return for each of
    these ``sizes`` of buckets the bytes per second of the slowest rank."""
    parts = None
    if routes.beside is not None:
        parts = plan_exchange(routes.plan, routes.tensors, routes.beside.ranks)
    addresses = await calls.on_ranks("connect", lambda rank: rank.listen_for_engines())
    of_rank: dict[int, GroupMember] = {}
    numbers: dict[int, dict[int, int]] = {}  # of a rank: worker → its number in the group
    of_worker: dict[int, tuple[list[Any], list[tuple[int, int]]]] = {}
    for ranks, workers in routes.groups():
        address, senders, size = addresses[ranks[0]], len(ranks), len(ranks) + len(workers)
        of_member = {worker: senders + place for place, worker in enumerate(workers)}
        for number, rank in enumerate(ranks):
            of_rank[rank] = GroupMember(address, number, senders, size)
            numbers[rank] = of_member
        number_of = {rank: number for number, rank in enumerate(ranks)}
        for worker, number in of_member.items():
            of_worker[worker] = (
                [list(address), number, senders, size],
                [(rank, number_of.get(rank, 0)) for rank in routes.plan.workers[worker].peers],
            )
    parcels: dict[EngineSlot, list[list[Any]]] = {slot: [] for slot in slots}
    for worker, ((slot, _), incoming) in enumerate(zip(routes.workers, routes.plan.workers, strict=True)):
        parcels[slot].append([*incoming.plain, *of_worker[worker]])
    by_engine = {id(slot.engine): of_engine for slot, of_engine in parcels.items()}

    async def join_group(number: int, rank: TrainerRank) -> list[float]:
        rates: list[float] = []
        if number in of_rank:
            rates = await rank.join_engines(of_rank[number], options["timeout_s"], sizes)
        part = () if parts is None else (parts[number],)
        await rank.take_route(*routes.plan.ranks[number].plain, numbers.get(number, {}), *part)
        return rates

    _, rates = await calls.together(
        slots,
        "connect",
        lambda engine: engine.connect_weights((), 1, 2, parcels=by_engine[id(engine)], sizes=tuple(sizes), **options),
        join_group,
    )
    measured = [of_one for of_one in rates if of_one]
    return {size: min(of_size) for size, *of_size in zip(sizes, *measured, strict=True)} if measured else {}


def compare_parcels(
    routes: WorkerRoutes, slots: Sequence[EngineSlot], received: Sequence[Sequence[Any]], sent: Sequence[Any]
) -> None:
    """Raise AttemptFailed unless what lies in every worker's parameters is what was sent to it.

    ``received``: of each engine's workers (rank, checksum) of each bucket; ``sent``: of each rank (worker, checksum).
    """
    found = {slot: workers for slot, workers in zip(slots, received, strict=True)}
    wrong: list[str] = []
    for worker, (slot, number) in enumerate(routes.workers):
        got = [tuple(pair) for pair in found[slot][number]]
        for rank in range(len(sent)):
            want = [total for peer, total in sent[rank] if peer == worker]
            have = [total for peer, total in got if peer == rank]
            if have != want:
                bucket = next((n for n, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]), 0)
                what = _content(routes, routes.plan.workers[worker], rank, bucket)
                wrong.append(
                    f"{slot.name}, worker {number}: bucket {bucket} of {len(want)} from rank {rank} is not what was "
                    f"sent (checksums differ): {what}"
                )
    if wrong:
        raise AttemptFailed("; ".join(wrong[:NAMED]))


def _content(routes: WorkerRoutes, parcels: Parcels, rank: int, bucket: int) -> str:
    """Name what is in a worker's bucket, by its number among those that come from one rank."""
    of_rank = parcels.buckets[parcels.buckets[:, 0] == rank]
    if bucket >= len(of_rank):
        return "nothing is planned"
    _, _, _, first, stop, _ = of_rank[bucket].tolist()
    names = [routes.tensors[number].name for number in dict.fromkeys(parcels.copies[first:stop, 0].tolist())]
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
