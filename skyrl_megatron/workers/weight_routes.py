"""Syncs by routes: the plan is made once, and each engine worker is connected to the ranks that it gets bytes from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from skyrl_megatron.inference.pool import EngineSlot
from skyrl_megatron.inference.protocol import InferenceEngine
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.exchange import plan_exchange
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.route_plan import Beside, RoutePlan, join
from skyrl_megatron.weight_sync.routes import Route, Unroutable, tensors_of
from skyrl_megatron.weight_sync.transport import GroupMember
from skyrl_megatron.workers.sync_calls import AttemptFailed, SyncCalls, TrainerRank

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
