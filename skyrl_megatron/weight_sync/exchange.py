"""Weights of ranks that share their GPU with one engine worker each, on several nodes.

What a worker needs of other ranks goes to the rank on its own GPU first, over the ranks' process group (NCCL, gloo on
CPU), and from there through memory that the two processes share. So no two members of a group are on one GPU, and no
byte crosses the network twice.

The buckets are those of the plan (``route_plan.py``). They cross in rounds: in each, a rank sends at most one bucket
and receives at most one, both at once, and every rank goes through its rounds in order. A worker gets its buckets in
the order of the plan.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.device import is_out_of_memory, shareable_bytes
from skyrl_megatron.weight_sync.bucket import TensorMeta, checksum
from skyrl_megatron.weight_sync.parcel_sender import STAGED, ParcelSender
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.route_plan import RoutePlan
from skyrl_megatron.weight_sync.source import TensorShard
from skyrl_megatron.weight_sync.transport import Transport

NONE = -1


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part. ``worker``: the one on its GPU; :data:`NONE`: there is no such."""

    worker: int = NONE
    incoming: list[tuple[int, int, str, str]] = field(default_factory=list)
    """The buckets of that worker, in order: rank that they come from, bytes, adapter, the last tensor in it."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """Number of an own bucket, the rank that it goes to, number of an incoming one; :data:`NONE`: neither."""


def plan_exchange(plan: RoutePlan, tensors: Sequence[TensorMeta], local: Sequence[int]) -> list[Exchange]:
    """Return each rank's part. ``tensors``: those that the plan numbers; ``local``: worker → the rank on its GPU."""
    found = [Exchange() for _ in plan.ranks]
    own: list[dict[int, list[int]]] = [defaultdict(list) for _ in plan.ranks]  # of a rank: worker → its buckets there
    for rank, parcels in enumerate(plan.ranks):
        for number, worker in enumerate(parcels.buckets[:, 0].tolist()):
            own[rank][worker].append(number)
    queue: list[tuple[int, int, int, int, int]] = []
    for worker, parcels in enumerate(plan.workers):
        to = local[worker]
        left = [iter(own[rank][worker]) for rank in range(len(plan.ranks))]
        incoming: list[tuple[int, int, str, str]] = []
        for rank, nbytes, *_, tensor in parcels.buckets.tolist():
            number = next(left[rank])
            if rank != to:
                queue.append((tensor, len(incoming), number, rank, to))
            incoming.append((rank, nbytes, tensors[tensor].adapter, tensors[tensor].name))
        found[to] = Exchange(worker, incoming)
    rounds: list[dict[int, list[int]]] = [defaultdict(lambda: [NONE, NONE, NONE]) for _ in plan.ranks]
    sends: list[set[int]] = [set() for _ in plan.ranks]
    next_free, next_receive = [0] * len(plan.ranks), [0] * len(plan.ranks)
    for _, position, number, rank, to in sorted(queue):
        turn = max(next_receive[to], next_free[rank])
        while turn in sends[rank]:
            turn += 1
        sends[rank].add(turn)
        while next_free[rank] in sends[rank]:
            sends[rank].discard(next_free[rank])
            next_free[rank] += 1
        next_receive[to] = turn + 1
        rounds[rank][turn][:2] = number, to
        rounds[to][turn][2] = position
    return [
        Exchange(each.worker, each.incoming, [(own[0], own[1], own[2]) for _, own in sorted(turns.items())])
        for each, turns in zip(found, rounds, strict=True)
    ]


class ExchangingSender(ParcelSender):
    """The buckets of a rank, of which those for the worker on its own GPU alone go to a worker from here."""

    def __init__(
        self,
        part: Exchange,
        parcels: Parcels,
        shards: Sequence[TensorShard],
        ranks_of: dict[int, int],
        device: torch.device,
    ) -> None:
        super().__init__(parcels, shards, ranks_of, device, in_place=False)
        self.part = part
        largest = max((part.incoming[arrives][1] for *_, arrives in part.rounds if arrives != NONE), default=0)
        self._received = [shareable_bytes(largest, device) for _ in range(STAGED)]

    def send(self, transport: Transport | None, travels: Callable[[str], bool]) -> list[list[int]]:
        """Exchange and send the buckets of adapters that ``travels`` says; return (worker, checksum) of each own one,
        in order. Raises RuntimeError (torch) when a rank or the worker is gone."""
        part, own_rank = self.part, dist.get_rank()
        workers = [worker for worker, *_ in self.parcels.buckets.tolist()]
        sums: dict[int, Tensor] = {}
        travelling: list[tuple[Tensor, Callable[[], None]]] = []
        local = iter([number for number, worker in enumerate(workers) if worker == part.worker])
        following = 0

        def wait_for(memory: Tensor) -> None:
            while any(each.data_ptr() == memory.data_ptr() for each, _ in travelling):
                travelling.pop(0)[1]()

        def filled(number: int) -> Tensor:
            content, copies = self._contents[number]
            wait_for(content)
            if copies is not None:
                copies()
            sums[number] = checksum(content)
            return content

        def hand_over(content: Tensor) -> None:
            assert transport is not None
            travelling.append((content, transport.send(content, self.ranks_of[part.worker])))

        def hand_over_own(stop: int) -> None:
            """Hand over what the worker gets from this rank itself before its bucket ``stop``."""
            nonlocal following
            for rank, _, adapter, _ in part.incoming[following:stop]:
                if rank == own_rank:
                    number = next(local)
                    if travels(adapter):
                        hand_over(filled(number))
            following = stop + 1

        turn = 0
        for number, to, arrives in part.rounds:
            if arrives != NONE:
                hand_over_own(arrives)
            operations, under_way = [], []
            if number != NONE and travels(self._firsts[number].adapter):
                operations.append(dist.P2POp(dist.isend, filled(number), to))
                under_way.append(f"{self._firsts[number].name} to trainer rank {to}")
            buffer = None
            if arrives != NONE:
                rank, nbytes, adapter, name = part.incoming[arrives]
                if travels(adapter):
                    buffer = self._received[turn % STAGED][:nbytes]
                    turn += 1
                    wait_for(buffer)
                    operations.append(dist.P2POp(dist.irecv, buffer, rank))
                    under_way.append(f"{name} from trainer rank {rank}")
            with _named(under_way):
                for work in dist.batch_isend_irecv(operations) if operations else ():
                    work.wait()
            if buffer is not None:
                hand_over(buffer)
        hand_over_own(len(part.incoming))
        for _, wait in travelling:
            wait()
        chosen = sorted(sums)
        totals = torch.stack([sums[number] for number in chosen]).tolist() if chosen else []
        return [[workers[number], total] for number, total in zip(chosen, totals, strict=True)]


@contextlib.contextmanager
def _named(under_way: Sequence[str]) -> Iterator[None]:
    """Say in an error of torch.distributed what was exchanged with whom."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise RuntimeError(f"exchange of {' and '.join(under_way)}: {error}") from error
