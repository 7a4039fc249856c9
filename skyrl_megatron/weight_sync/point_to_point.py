"""Send buckets by the reshard plan: from rank to worker, or first among ranks that share their GPU with one worker
each.

What a worker needs of other ranks goes to the rank on its own GPU first, over the ranks' process group (NCCL, gloo on
CPU), and from there through memory that the two processes share. So no two members of a group are on one GPU, and no
byte crosses the network twice.

The buckets are those of the plan (``route_plan.py``). They cross in rounds: in each, a rank sends at most one bucket
and receives at most one, both at once, and every rank goes through its rounds in order. A worker gets its buckets in
the order of the plan.

What is checked is in its place already: the copies of a bucket are read back into its buffer, whose checksum is then
that of the targets' memory, before anything packs it for a kernel. A bucket that is one contiguous copy is received in
place. The device computes checksums as it goes; they are read once, at the end of an update.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device as devices
from skyrl_megatron.device import is_out_of_memory, shareable_bytes
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.buckets import TensorMeta, checksum
from skyrl_megatron.weight_sync.export_plan import Copies
from skyrl_megatron.weight_sync.reshard_plan import RoutePlan
from skyrl_megatron.weight_sync.slices import Parcels, Run
from skyrl_megatron.weight_sync.tensors import TensorShard
from skyrl_megatron.weight_sync.transport import Transport, not_received

STAGED, AHEAD = 2, 16
"""Buckets on their way at once: those that lie in a buffer, and all of them."""


class ParcelSender:
    """The buckets of ``parcels``, of parts of ``shards``, which stay where they are or are made when they are copied.

    ``ranks_of``: worker → its rank in the group. ``in_place``: large pieces may be sent from where they lie.
    """

    def __init__(
        self,
        parcels: Parcels,
        shards: Sequence[TensorShard],
        ranks_of: dict[int, int],
        device: torch.device,
        *,
        in_place: bool = True,
    ) -> None:
        self.parcels, self.ranks_of, self.device = parcels, ranks_of, device
        self._firsts: list[TensorMeta] = []
        """The first tensor in each bucket."""
        self._contents: list[tuple[Tensor, Copies | None]] = []
        buckets = parcels.buckets.tolist()
        runs = [[each for run in of_bucket for each in _made_alone(run, shards)] for of_bucket in parcels.runs()]
        parts = [[_part(shards[run.copy[4]], run) for run in of_bucket] for of_bucket in runs]
        alone = [in_place and bool(bucket[2]) for bucket in buckets]
        direct = [_in_place(each[0]) if is_alone else None for is_alone, each in zip(alone, parts, strict=True)]
        sizes = zip(buckets, direct, strict=True)
        largest = max((nbytes for (_, nbytes, *_), content in sizes if content is None), default=0)
        self._buffers = [shareable_bytes(largest, device) for _ in range(STAGED)]
        free = itertools.cycle(self._buffers)
        for (_, nbytes, *_), of_bucket, each, content in zip(buckets, runs, parts, direct, strict=True):
            self._firsts.append(shards[of_bucket[0].copy[4]].meta)
            if content is not None:
                self._contents.append((content, None))
                continue
            buffer, packing = next(free)[:nbytes], Copies()
            for run, part in zip(of_bucket, each, strict=True):
                packing.add(run.piece(buffer, shards[run.copy[4]].local.dtype), part)
            self._contents.append((buffer, packing))

    def send(self, transport: Transport | None, travels: Callable[[str], bool]) -> list[list[int]]:
        """Send the buckets of adapters that ``travels`` says; return (worker, checksum) of each, in order. Raises
        RuntimeError (torch) when a worker is gone, WeightSyncError without a ``transport`` where there is a bucket."""
        if not self._contents:
            return []
        if transport is None:
            raise WeightSyncError("send: no engine is connected: connect() comes first")
        travelling: list[tuple[Tensor, Callable[[], None]]] = []
        sums: list[Tensor] = []
        workers = [worker for worker, *_ in self.parcels.buckets.tolist()]
        chosen = [number for number, meta in enumerate(self._firsts) if travels(meta.adapter)]
        for number in chosen:
            content, copies = self._contents[number]
            while len(travelling) >= AHEAD or (
                copies is not None and any(_same_memory(each, content) for each, _ in travelling)
            ):
                travelling.pop(0)[1]()
            if copies is not None:
                copies()
            sums.append(checksum(content))
            travelling.append((content, transport.send(content, self.ranks_of[workers[number]])))
        for _, wait in travelling:
            wait()
        totals = torch.stack(sums).tolist() if sums else []
        return [[workers[number], total] for number, total in zip(chosen, totals, strict=True)]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _made_alone(run: Run, shards: Sequence[TensorShard]) -> Iterator[Run]:
    """Yield the run, or copy by copy what is made when it is copied."""
    if run.count == 1 or shards[run.copy[4]].make is None:
        yield run
        return
    tensor, at, rows, columns, shard, first, *rest = run.copy
    for n in range(run.count):
        yield Run([tensor, at + n * run.bytes_apart, rows, columns, shard, first + n * run.apart, *rest], 1, 0, 0)


def _part(shard: TensorShard, run: Run) -> Tensor | Callable[[], Tensor]:
    """View the rows and columns of copies in their shard, or return what makes them."""
    _, _, rows, columns, _, first, step, column = run.copy
    shape = shard.local.shape
    if first + (run.count - 1) * run.apart + (rows - 1) * step >= shape[0] or column + columns > shape[1]:
        raise WeightSyncError(f"rows {first} … of a shard {list(shape)} are planned, which it does not have")
    part = shard.part(slice(first, first + (rows - 1) * step + 1, step), slice(column, column + columns))
    return run.of(part, run.apart * shard.local.stride(0)) if isinstance(part, Tensor) else part


def _in_place(part: Tensor | Callable[[], Tensor]) -> Tensor | None:
    """View the bytes of a part as they lie in memory; None: not in one piece."""
    return part.flatten().view(torch.uint8) if isinstance(part, Tensor) and part.is_contiguous() else None


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


class Targets(Protocol):
    """The memory of a model that is being loaded."""

    def memory(self, target: int) -> Tensor:
        """Return a target as it is before it is packed for a kernel; its memory exists from now on."""

    def complete(self, target: int) -> None:
        """Go on with a target that everything was copied to."""


@dataclass(slots=True)
class _Bucket:
    number: int
    buffer: Tensor
    targets: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Views of the buffer, one for each of ``targets``; none where it is the target's own memory."""
    wait: Callable[[], None] | None = None


class _Room:
    """Bytes of buckets that were asked for and not gone on with: at most ``limit``, or one bucket."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.closed = limit, 0, False
        self.changed = threading.Condition()

    def enter(self, nbytes: int, wait: bool) -> bool:
        """Take room; return whether there is. ``wait``: until there is. Raises WeightSyncError once it is closed."""
        with self.changed:
            while not self.closed and self.used and self.used + nbytes > self.limit:
                if not wait:
                    return False
                self.changed.wait()
            if self.closed:
                raise WeightSyncError("receive: what was received could not be gone on with")
            self.used += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        """Give room back."""
        with self.changed:
            self.used -= nbytes
            self.changed.notify()

    def close(self) -> None:
        """End the thread that waits for room."""
        with self.changed:
            self.closed = True
            self.changed.notify()


class ParcelReceiver:
    """Receives ``parcels`` from the trainer ranks of a group. ``numbers``: rank → the member that sends its buckets.

    ``dtypes``: of the tensors that ``parcels`` number. At most ``bucket_bytes`` · 2 are under way or in buffers.
    """

    def __init__(
        self,
        parcels: Parcels,
        transport: Transport,
        numbers: Mapping[int, int],
        dtypes: Sequence[torch.dtype],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self.parcels, self.transport, self.numbers, self.dtypes = parcels, transport, numbers, dtypes
        self.limit, self.device = 2 * bucket_bytes, device
        self.checksums: list[list[int]] = []
        """(rank, checksum) of every bucket of the last update, in order."""
        self.received_bytes = 0
        self._sums: list[tuple[int, Tensor]] = []
        """(rank, checksum on the device) of each bucket of the update in progress."""
        self._free: list[Tensor] = []
        self._buckets = parcels.buckets.tolist()
        self._largest = max((nbytes for _, nbytes, direct, *_ in self._buckets if not direct), default=0)
        self._runs = parcels.runs()
        self._ends = _last_uses(parcels)

    def receive(self, targets: Targets, numbers: Sequence[int] | None = None) -> None:
        """Receive everything, or the buckets of these ``numbers``, into ``targets``. Raises WeightSyncError when a
        rank is gone or silent, or there is no memory for a bucket.

        A thread asks for buckets and takes them, as asking waits for a connection that is being read from; this one
        goes on with targets, which packs them.
        """
        self.checksums, self.received_bytes, self._sums = [], 0, []
        chosen = range(len(self._buckets)) if numbers is None else numbers
        taken: queue.SimpleQueue[BaseException | Callable[[], None]] = queue.SimpleQueue()
        room = _Room(self.limit)
        threading.Thread(target=self._receive_all, args=(targets, chosen, taken, room), daemon=True).start()
        try:
            for number in chosen:
                copied = taken.get()
                if isinstance(copied, BaseException):
                    raise copied
                if ends := self._ends.get(number, ()):
                    copied()  # the thread that receives may have a stream of its own
                for target in ends:
                    targets.complete(target)
                room.leave(self._held(number))
        finally:
            room.close()
        totals = torch.stack([total for _, total in self._sums]).tolist() if self._sums else []
        self.checksums = [[rank, total] for (rank, _), total in zip(self._sums, totals, strict=True)]

    def _receive_all(
        self,
        targets: Targets,
        numbers: Sequence[int],
        taken: queue.SimpleQueue[BaseException | Callable[[], None]],
        room: _Room,
    ) -> None:
        """Receive these buckets in order; tell ``taken`` of each, or of what went wrong."""
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device)
            ahead: deque[_Bucket] = deque()
            following = 0
            for number in numbers:
                rank, nbytes, *_ = self._buckets[number]
                while following < len(numbers) and room.enter(self._held(numbers[following]), wait=not ahead):
                    ahead.append(self._begun(numbers[following], targets))
                    following += 1
                bucket = ahead.popleft()
                with self._raising(rank):
                    assert bucket.wait is not None
                    bucket.wait()
                self._take(bucket)
                self.received_bytes += nbytes
                taken.put(devices.mark())
        except BaseException as error:  # whatever it is, the other thread raises it
            taken.put(error)

    def close(self) -> None:
        """Leave the group and free the buffers."""
        self.transport.close()
        self._free = []

    def _held(self, number: int) -> int:
        """Return the memory that a bucket takes while it is under way."""
        _, nbytes, direct, *_ = self._buckets[number]
        return nbytes if direct else self._largest

    def _new(self) -> Tensor:
        return torch.empty(self._largest, dtype=torch.uint8, device=self.device)

    def _begun(self, number: int, targets: Targets) -> _Bucket:
        """Start receiving a bucket, into the memory that it belongs in or beside it."""
        rank, nbytes, direct, *_ = self._buckets[number]
        runs = self._runs[number]
        places = [run.of(_place(targets.memory(run.copy[4]), run.copy), run.apart) for run in runs]
        if direct:
            (place,) = places
            bucket = _Bucket(number, place.as_strided((place.numel(),), (1,)).view(torch.uint8))
        else:
            with self._raising(rank):
                memory = self._free.pop() if self._free else self._new()
            bucket = _Bucket(number, memory[:nbytes], places)
            bucket.pieces = [run.piece(memory, self.dtypes[run.copy[0]]) for run in runs]
        with self._raising(rank):
            bucket.wait = self.transport.receive(bucket.buffer, self.numbers[rank])
        return bucket

    def _take(self, bucket: _Bucket) -> None:
        """Copy a bucket's pieces to their places, and read them back for the checksum."""
        if bucket.pieces:
            copy_all(bucket.targets, bucket.pieces)
            for target, piece in zip(bucket.targets, bucket.pieces, strict=True):
                _read_back(piece, target)
        rank = self._buckets[bucket.number][0]
        self._sums.append((rank, checksum(bucket.buffer)))
        if bucket.pieces:
            self._free.append(bucket.buffer.as_strided((self._largest,), (1,)))

    @contextlib.contextmanager
    def _raising(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise not_received(error, f"trainer rank {rank}", self.received_bytes) from error


def copy_all(targets: list[Tensor], pieces: list[Tensor]) -> None:
    """Copy the pieces of a bucket to their places."""
    torch._foreach_copy_(targets, pieces)


def _place(memory: Tensor, copy: Sequence[int]) -> Tensor:
    """View where a copy belongs: [rows, columns]."""
    _, _, rows, columns, _, offset, by_row, by_column = copy
    return memory.as_strided((rows, columns), (by_row, by_column), memory.storage_offset() + offset)


def _read_back(piece: Tensor, target: Tensor) -> None:
    """Put what a target has into the piece that it was copied from. One that lost bits of a wider type on the way is
    compared with what it should have become."""
    if torch.promote_types(piece.dtype, target.dtype) == target.dtype:
        piece.copy_(target)
    else:
        wrong = (target != piece.to(target.dtype)).any()
        piece.view(torch.uint8).bitwise_xor_(wrong.to(torch.uint8) * 255)


def _last_uses(parcels: Parcels) -> dict[int, list[int]]:
    """Return, by bucket, the targets that are whole with it."""
    last: dict[int, int] = {}
    for number, (*_, first, stop, _) in enumerate(parcels.buckets.tolist()):
        for target in parcels.copies[first:stop, 4].tolist():
            last[target] = number
    ends: dict[int, list[int]] = {}
    for target, number in last.items():
        ends.setdefault(number, []).append(target)
    return ends
