"""Syncs by routes: the plan is made once, and each engine worker is connected to the ranks that it gets bytes from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_megatron.inference.pool import EngineSlot
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.route_plan import RoutePlan, join
from skyrl_megatron.weight_sync.routes import Holdings, Route, Unroutable, tensors_of
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

    @property
    def nbytes(self) -> int:
        """Bytes that all workers receive."""
        return sum(parcels.nbytes for parcels in self.plan.workers)

    def peers(self, rank: int) -> list[int]:
        """List the workers that a rank sends to: ranks 1, 2, … of its group."""
        return self.plan.ranks[rank].peers


async def plan_routes(calls: SyncCalls, slots: Sequence[EngineSlot], bucket_bytes: int) -> WorkerRoutes | str:
    """Return the plan of a sync of these engines, or why weights cannot travel by routes."""
    holdings = await calls.on_ranks("metadata", lambda rank: rank.weight_holdings())
    if why := next((each for each in holdings if isinstance(each, str)), None):
        return why
    try:
        return await _joined(calls, slots, holdings, bucket_bytes)
    except Unroutable as error:
        return str(error)


async def _joined(
    calls: SyncCalls, slots: Sequence[EngineSlot], holdings: Sequence[Holdings], bucket_bytes: int
) -> WorkerRoutes:
    tensors = tensors_of(holdings)
    recorded = await calls.on_engines(slots, "connect", lambda engine: engine.weight_routes(tensors))
    routes: list[Route] = []
    workers: list[tuple[EngineSlot, int]] = []
    for slot, answer in zip(slots, recorded, strict=True):
        if isinstance(answer, str):
            raise Unroutable(f"{slot.name}: {answer}")
        for number, (targets, copies) in enumerate(answer):
            routes.append(Route.of_plain(targets, copies))
            workers.append((slot, number))
    plan = await asyncio.to_thread(join, tensors, holdings, routes, bucket_bytes)
    return WorkerRoutes(tensors, plan, workers)


async def connect_routes(
    calls: SyncCalls, slots: Sequence[EngineSlot], routes: WorkerRoutes, options: dict[str, Any]
) -> None:
    """Give ranks and workers their parcels, and open a group of each rank that sends and its workers."""
    addresses = await calls.on_ranks("connect", lambda rank: rank.listen_for_engines())
    groups: list[list[tuple[int, int, int, int]]] = [[] for _ in routes.workers]
    for rank in range(len(addresses)):
        peers = routes.peers(rank)
        for own, worker in enumerate(peers, start=1):
            groups[worker].append((rank, rank, own, len(peers) + 1))
    parcels: dict[EngineSlot, list[list[Any]]] = {slot: [] for slot in slots}
    for (slot, _), incoming, of_worker in zip(routes.workers, routes.plan.workers, groups, strict=True):
        parcels[slot].append([*incoming.plain, of_worker])
    by_engine = {id(slot.engine): of_engine for slot, of_engine in parcels.items()}

    async def open_group(number: int, rank: TrainerRank) -> None:
        peers = routes.peers(number)
        if peers:
            await rank.connect_engines(len(peers), options["timeout_s"])
        ranks_of = {worker: own for own, worker in enumerate(peers, start=1)}
        await rank.take_route(*routes.plan.ranks[number].plain, ranks_of)

    await calls.together(
        slots,
        "connect",
        lambda engine: engine.connect_weights(addresses, 1, 2, parcels=by_engine[id(engine)], **options),
        open_group,
    )


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
