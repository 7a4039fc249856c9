"""Concurrent calls to trainer ranks and engines in a weight sync, with deadlines, and their reshard plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from skyrl_megatron import progress as spans
from skyrl_megatron.errors import EngineError, EngineGoneError, RankLostError, WeightSyncError
from skyrl_megatron.inference.engine_pool import EngineSlot
from skyrl_megatron.inference.protocol import InferenceEngine
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.point_to_point import plan_exchange
from skyrl_megatron.weight_sync.probe import LogprobDiff
from skyrl_megatron.weight_sync.reshard_plan import Colocation, ReshardPlan, plan_reshard
from skyrl_megatron.weight_sync.slices import ReshardUnsupported, SourceMap, TargetMap, TransferList, tensors_of
from skyrl_megatron.weight_sync.transport import GroupMember
from skyrl_megatron.workers.actor_group import GRACE_S

if TYPE_CHECKING:
    from skyrl_megatron.types import Part
    from skyrl_megatron.weight_sync.point_to_point import ExchangeSchedule


log = logging.getLogger(__name__)
type _Failed = dict[int, tuple[float, Exception]]
"""Rank → (seconds until it failed, error), in the order of the failures."""
ANSWER_S = 30.0
"""Deadline of the health probe of an engine after a failure."""
LATER_S = 5.0
"""Callers wait this much longer than the called side, whose error says more."""


class TrainerRank(Protocol):
    """One rank of the policy. All ranks get every call at the same time."""

    async def weight_metadata(self) -> Sequence[TensorMeta]:
        """List the tensors that the rank sends; empty if it sends none."""

    async def weights_moved(self) -> bool:
        """Return whether other ranks have tensors of this rank's list, because experts moved since
        :meth:`weight_metadata`. Called only if experts move."""

    async def listen_for_engines(self) -> tuple[str, int]:
        """Reserve an address for this rank's group (``WeightSender.listen``)."""

    async def connect_engines(self, receivers: int, timeout_s: float) -> None:
        """Open a separate group at that address, in which every worker receives all tensors of the rank
        (``WeightSender.connect``)."""

    async def join_engines(self, member: GroupMember, timeout_s: float, sizes: Sequence[int]) -> list[float]:
        """Join a group, where every worker gets its own part (``WeightSender.join``)."""

    async def weight_source_map(self) -> SourceMap | str:
        """Return the slices that the rank holds, or why there can be no plan (``WeightSender.source_map``)."""

    async def set_transfers(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: ExchangeSchedule | None = None
    ) -> None:
        """Use a send list from now on (``WeightSender.set_transfers``). ``exchange``: where ranks share GPUs
        with engines of several nodes."""

    async def send_weights(self, adapters: Sequence[str] | None = None) -> list[Any]:
        """Send the weights, or only these adapters. Return the checksum of each bucket (``WeightSender.send``)."""

    async def score(
        self, token_ids: Sequence[int], *, perturbation: float = 0.0, adapter: str = ""
    ) -> list[float] | None:
        """Return log-probs of tokens 1 … n−1 at temperature 1 in nats, on a rank that has them; None on the others.

        ``perturbation``: relative change of every embedding (``runtime/forward_step.py``). ``adapter``: name of the
        adapter, if there are several."""

    async def offload(self, parts: Sequence[Part]) -> None:
        """Free GPU memory for engines on the same GPUs. The parts are reloaded when the rank needs them. Called
        only if ranks and engines share GPUs."""


class EnginesLost(Exception):
    """Engines that do not answer or have wrong weights, and must be restarted."""

    def __init__(self, phase: str, causes: Mapping[EngineSlot, str]) -> None:
        super().__init__("; ".join(f"{slot.name}, phase {phase}: {why}" for slot, why in causes.items()))
        self.causes = dict(causes)


class EnginesDisagree(EnginesLost):
    """Engines whose log-probs differ from the trainer's, although all checksums match."""


class AttemptFailed(Exception):
    """A sync failed although every engine answers, for example with wrong checksums."""


class _NoAnswer(EngineError):
    """A call reached its deadline."""


class SyncCalls:
    """Makes the calls of weight syncs.

    ``phase_s``: deadline of each call, and of ranks waiting for each other. ``ends``: deadline of the current sync
    (``time.monotonic``). ``look``: called when ranks do not answer; returns a text for the error message.
    ``end_waiting``: called with a rank's error if others wait for that rank; ends the ranks that cannot continue.
    """

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
        """Call all engines and return their results. ``within_s``: a deadline shorter than ``phase_s``."""
        return (await self.together(slots, phase, call, None, within_s))[0]

    async def on_ranks(self, phase: str, call: Callable[[TrainerRank], Awaitable[Any]]) -> list[Any]:
        """Call all ranks and return their results."""
        return (await self.together([], phase, None, lambda _, rank: call(rank)))[1]

    async def together(
        self,
        slots: Sequence[EngineSlot],
        phase: str,
        of_engine: Callable[[InferenceEngine], Awaitable[Any]] | None,
        of_rank: Callable[[int, TrainerRank], Awaitable[Any]] | None,
        within_s: float | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Call engines and ranks at the same time, and return the results of both.

        If a rank fails, calls that wait for it fail too, or are cancelled after :data:`GRACE_S`. Raises the error that
        explains the others. ``within_s``: as in :meth:`on_engines`.
        """
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
        results = await self._results([asyncio.ensure_future(call) for call in work], failed)
        of_engines, of_ranks = results[: len(slots)], results[len(slots) :]
        lost = {slot: str(e) for slot, e in zip(slots, of_engines, strict=True) if isinstance(e, BaseException)}
        if lost or failed:
            raise await self._explanation(phase, lost, failed)
        return list(of_engines), list(of_ranks)

    async def _results(self, calls: Sequence[asyncio.Future[Any]], failed: _Failed) -> list[Any]:
        """Return the results and errors of all calls. If a rank failed, cancel the calls that still wait for it."""
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
        """Return the error that a rank raised itself, before its deadline. A lost process comes first."""
        errors = [e for after, e in failed.values() if after < self.phase_s and not isinstance(e, EngineError)]
        return min(errors, key=lambda error: not isinstance(error, RankLostError), default=None)

    async def _explanation(self, phase: str, engines: Mapping[EngineSlot, str], ranks: _Failed) -> BaseException:
        """Return the error that explains a failed call.

        In this order: a rank's own error (a lost process first), EnginesLost for engines that do not answer,
        WeightSyncError for ranks that do not answer, the error of a rank that waited until its deadline, and
        AttemptFailed otherwise.
        """
        if rank_error := self._own(ranks):
            return rank_error
        if silent := {slot: why for slot, why in engines.items() if not await self._answers(slot)}:
            return EnginesLost(phase, silent)
        if mute := {number: error for number, (_, error) in sorted(ranks.items()) if isinstance(error, _NoAnswer)}:
            names = ", ".join(f"trainer rank {number}" for number in mute)
            details = await asyncio.to_thread(self.look)
            why = next(iter(mute.values()))
            return WeightSyncError(f"{names}, phase {phase}: {why} (trainer.phase_timeout_s){details}")
        if late := [error for _, error in ranks.values() if not isinstance(error, EngineError)]:
            return late[0]
        errors = [f"{slot.name}, phase {phase}: {why}" for slot, why in engines.items()]
        errors += [f"trainer rank {number}, phase {phase}: {error}" for number, (_, error) in sorted(ranks.items())]
        return AttemptFailed("; ".join(errors))

    async def within(self, work: Awaitable[Any], within_s: float | None = None) -> Any:
        """Await ``work`` until the deadline of the phase or the sync, plus :data:`LATER_S`. Raises EngineError."""
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
"""Largest number of wrong buckets, and of tensors per bucket, in a message."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A plan for engines, worker after worker."""

    tensors: Sequence[TensorMeta]
    reshard: ReshardPlan
    workers: Sequence[tuple[EngineSlot, int]]
    """Engine and number in it of each worker of the plan."""
    colocation: Colocation | None = None
    """The rank on each worker's device, through which it gets everything; None: it gets each bucket from its rank."""

    @property
    def nbytes(self) -> int:
        """Bytes that all workers receive."""
        return sum(transfers.nbytes for transfers in self.reshard.workers)

    def of(self, adapters: Collection[str]) -> WorkerPlan:
        """Return the part that some of the adapters travel by."""
        chosen = np.array([meta.adapter in adapters for meta in self.tensors])

        def part(transfers: TransferList) -> TransferList:
            return TransferList(transfers.buckets[chosen[transfers.buckets[:, 5]]], transfers.copies)

        ranks, workers = (list(map(part, side)) for side in (self.reshard.ranks, self.reshard.workers))
        return WorkerPlan(self.tensors, ReshardPlan(ranks, workers), self.workers, self.colocation)

    def groups(self) -> list[tuple[list[int], list[int]]]:
        """Return the ranks and the workers of each group: one of all that send or receive; or of each rank and the
        worker on its device."""
        if self.colocation is not None:
            return [([rank], [worker]) for worker, rank in enumerate(self.colocation.ranks)]
        sending = [rank for rank, transfers in enumerate(self.reshard.ranks) if len(transfers.buckets)]
        return [(sending, list(range(len(self.workers))))]


class ReshardPlanner:
    """Makes plans of buckets of ``bucket_bytes``. What an engine needs is recorded once, for as long as it lives."""

    def __init__(self, calls: SyncCalls, bucket_bytes: int) -> None:
        self.calls, self.bucket_bytes = calls, bucket_bytes
        self._tensors: Sequence[TensorMeta] = ()
        self._recorded: WeakKeyDictionary[InferenceEngine, Sequence[TargetMap]] = WeakKeyDictionary()
        """What each worker of an engine needs of these tensors."""

    async def plan(
        self, slots: Sequence[EngineSlot], rank_of: Callable[[EngineSlot, int], int] | None = None, per_node: int = 1
    ) -> WorkerPlan | str:
        """Return the plan of a sync of these engines, or why weights cannot travel by plan. ``rank_of``: the rank on
        the device of an engine's worker, where ranks, ``per_node`` of them on each node, exchange weights."""
        source_maps = await self.calls.on_ranks("metadata", lambda rank: rank.weight_source_map())
        if why := next((source_map for source_map in source_maps if isinstance(source_map, str)), None):
            return why
        try:
            tensors = tensors_of(source_maps)
            await self._record(slots, tensors)
            workers = [(slot, number) for slot in slots for number in range(len(self._recorded[slot.engine]))]
            target_maps = [target_map for slot in slots for target_map in self._recorded[slot.engine]]
            colocation = None if rank_of is None else Colocation([rank_of(*worker) for worker in workers], per_node)
            plan = await asyncio.to_thread(
                plan_reshard, tensors, source_maps, target_maps, self.bucket_bytes, colocation
            )
        except ReshardUnsupported as error:
            return str(error)
        return WorkerPlan(tensors, plan, workers, colocation)

    async def _record(self, slots: Sequence[EngineSlot], tensors: Sequence[TensorMeta]) -> None:
        if tensors != self._tensors:
            self._tensors, self._recorded = tensors, WeakKeyDictionary()
        new = [slot for slot in slots if slot.engine not in self._recorded]
        answers = await self.calls.on_engines(new, "connect", lambda engine: _targets_of(engine, tensors))
        for slot, answer in zip(new, answers, strict=True):
            if isinstance(answer, str):
                raise ReshardUnsupported(f"{slot.name}: {answer}")
            self._recorded[slot.engine] = [TargetMap.from_wire(targets, copies) for targets, copies in answer]


async def _targets_of(engine: InferenceEngine, tensors: Sequence[TensorMeta]) -> list[Any] | str:
    try:
        return await engine.weight_targets(tensors)
    except AttributeError as error:  # an engine of a plugin may leave it out
        return f"it records no reshard targets: {error}"


async def connect_workers(
    calls: SyncCalls,
    slots: Sequence[EngineSlot],
    plan: WorkerPlan,
    options: dict[str, Any],
    sizes: Sequence[int] = (),
) -> dict[int, float]:
    """Give ranks and workers their transfers, and open the groups of those that send to one another. Return for
    each of these ``sizes`` of buckets the bytes per second of the slowest rank."""
    parts = None
    if plan.colocation is not None:
        parts = plan_exchange(plan.reshard, plan.tensors, plan.colocation.ranks)
    addresses = await calls.on_ranks("connect", lambda rank: rank.listen_for_engines())
    of_rank: dict[int, GroupMember] = {}
    numbers: dict[int, dict[int, int]] = {}  # of a rank: worker → its number in the group
    of_worker: dict[int, tuple[list[Any], list[tuple[int, int]]]] = {}
    for ranks, workers in plan.groups():
        address, senders, size = addresses[ranks[0]], len(ranks), len(ranks) + len(workers)
        of_member = {worker: senders + position for position, worker in enumerate(workers)}
        for number, rank in enumerate(ranks):
            of_rank[rank] = GroupMember(address, number, senders, size)
            numbers[rank] = of_member
        number_of = {rank: number for number, rank in enumerate(ranks)}
        for worker, number in of_member.items():
            of_worker[worker] = (
                [list(address), number, senders, size],
                [(rank, number_of.get(rank, 0)) for rank in plan.reshard.workers[worker].peers],
            )
    transfers: dict[EngineSlot, list[list[Any]]] = {slot: [] for slot in slots}
    for worker, ((slot, _), incoming) in enumerate(zip(plan.workers, plan.reshard.workers, strict=True)):
        transfers[slot].append([*incoming.wire, *of_worker[worker]])
    by_engine = {id(slot.engine): of_engine for slot, of_engine in transfers.items()}

    async def join_group(number: int, rank: TrainerRank) -> list[float]:
        rates: list[float] = []
        if number in of_rank:
            rates = await rank.join_engines(of_rank[number], options["timeout_s"], sizes)
        part = () if parts is None else (parts[number],)
        await rank.set_transfers(*plan.reshard.ranks[number].wire, numbers.get(number, {}), *part)
        return rates

    _, rates = await calls.together(
        slots,
        "connect",
        lambda engine: engine.connect_weights(
            (), 1, 2, transfers=by_engine[id(engine)], sizes=tuple(sizes), **options
        ),
        join_group,
    )
    measured = [of_one for of_one in rates if of_one]
    return {size: min(of_size) for size, *of_size in zip(sizes, *measured, strict=True)} if measured else {}


def compare_checksums(
    plan: WorkerPlan, slots: Sequence[EngineSlot], received: Sequence[Sequence[Any]], sent: Sequence[Any]
) -> None:
    """Raise AttemptFailed unless the checksums of every worker's parameters match those that were sent.

    ``received``: per engine and worker, (rank, checksum) of each bucket. ``sent``: per rank, (worker, checksum).
    """
    checksums = {slot: workers for slot, workers in zip(slots, received, strict=True)}
    wrong: list[str] = []
    for worker, (slot, number) in enumerate(plan.workers):
        got = [tuple(pair) for pair in checksums[slot][number]]
        for rank in range(len(sent)):
            want = [total for peer, total in sent[rank] if peer == worker]
            have = [total for peer, total in got if peer == rank]
            if have != want:
                bucket = next((n for n, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]), 0)
                what = _content(plan, plan.reshard.workers[worker], rank, bucket)
                wrong.append(
                    f"{slot.name}, worker {number}: the checksum of bucket {bucket} of {len(want)} from rank {rank} "
                    f"differs from the sent one: {what}"
                )
    if wrong:
        raise AttemptFailed("; ".join(wrong[:NAMED]))


def _content(plan: WorkerPlan, transfers: TransferList, rank: int, bucket: int) -> str:
    """List the tensors of a worker's bucket. ``bucket``: its index among those from one rank."""
    of_rank = transfers.buckets[transfers.buckets[:, 0] == rank]
    if bucket >= len(of_rank):
        return "it is not in the plan"
    _, _, _, first, stop, _ = of_rank[bucket].tolist()
    names = [plan.tensors[number].name for number in dict.fromkeys(transfers.copies[first:stop, 0].tolist())]
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def compare_buckets(
    slots: Sequence[EngineSlot], received: Sequence[list[list[list[int]]]], sent: list[list[int]]
) -> None:
    """Raise AttemptFailed unless every worker of every engine received every bucket unchanged."""
    wrong: list[str] = []
    nothing: list[int] = []
    for slot, workers in zip(slots, received, strict=True):
        for worker, sums in enumerate(workers):
            for sender, (got, want) in enumerate(zip_longest(sums, sent, fillvalue=nothing)):
                if got != want:
                    first = next(n for n, pair in enumerate(zip_longest(got, want)) if pair[0] != pair[1])
                    wrong.append(
                        f"{slot.name}, worker {worker}: bucket {first} of {len(want)} from sender {sender} is not "
                        "what was sent (checksums differ)"
                    )
    if wrong:
        raise AttemptFailed("; ".join(wrong[:4]))


@dataclass(slots=True)
class SyncReport:
    """Cost and outcome of a sync."""

    version: str
    nbytes: int
    engines: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase; if engines failed, of the last attempt."""
    logprob_diffs: dict[str, LogprobDiff] = field(default_factory=dict)
    """Result of the probe for each engine, if it was due. The key of a named adapter is ``engine 0, math``."""
    adapters: tuple[str, ...] | None = None
    """The adapters that were sent; None if weights were."""
    failures: list[str] = field(default_factory=list)
    """Failures that the sync recovered from."""

    @property
    def total_seconds(self) -> float:
        """Seconds of the last attempt, from pause to resume."""
        return sum(self.seconds.values())

    @property
    def gigabytes_per_second(self) -> float:
        """GB sent per second of the transfer. Each engine receives all of them; with a reshard plan, all engines
        together do."""
        return self.nbytes / self.seconds["transfer"] / 1e9

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began
