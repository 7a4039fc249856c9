"""Send and receive the buckets of the reshard plan (``reshard_plan.py``), point to point.

:class:`SliceSender` sends from a trainer rank to engine workers. :class:`ExchangeSender` is for ranks that share each
GPU with one worker. Slices of other ranks go to the rank on the worker's GPU first, over the ranks' process group
(NCCL, or gloo on CPU), then to the worker through memory that the two processes share. So no two members of a group
are on one GPU, and no byte crosses the network twice. The exchange runs in rounds: in each, a rank sends at most one
bucket and receives at most one, both at once. Every rank takes its rounds in order, and a worker gets its buckets in
the order of the plan.

:class:`SliceReceiver` verifies the final memory: it reads the copies of a bucket back into the bucket's buffer, and
computes the checksum of that, before a kernel's layout is packed. A bucket that is one contiguous copy is received in
place. Checksums are computed on the device and read once, at the end of an update.
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
from skyrl_megatron.weight_sync.reshard_plan import ReshardPlan
from skyrl_megatron.weight_sync.slices import Run, TransferList
from skyrl_megatron.weight_sync.tensors import TensorShard
from skyrl_megatron.weight_sync.transport import Transport, not_received

STAGED, AHEAD = 2, 16
"""Maximum number of buckets in flight: those that use a staging buffer, and all of them."""


class SliceSender:
    """Sends the buckets of ``transfers``, which are slices of ``shards``.

    ``ranks_of``: worker → its rank in the group. ``in_place``: large slices may be sent from the shard's own memory.
    """

    def __init__(
        self,
        transfers: TransferList,
        shards: Sequence[TensorShard],
        ranks_of: dict[int, int],
        device: torch.device,
        *,
        in_place: bool = True,
    ) -> None:
        self.transfers, self.ranks_of, self.device = transfers, ranks_of, device
        self._firsts: list[TensorMeta] = []
        """The first tensor of each bucket."""
        self._contents: list[tuple[Tensor, Copies | None]] = []
        buckets = transfers.buckets.tolist()
        runs = [[single for run in of_bucket for single in _made_alone(run, shards)] for of_bucket in transfers.runs()]
        parts = [[_part(shards[run.copy[4]], run) for run in of_bucket] for of_bucket in runs]
        alone = [in_place and bool(bucket[2]) for bucket in buckets]
        direct = [_in_place(pieces[0]) if is_alone else None for is_alone, pieces in zip(alone, parts, strict=True)]
        sizes = zip(buckets, direct, strict=True)
        # buckets that are sent from the shard's own memory need no staging buffer
        largest = max((nbytes for (_, nbytes, *_), content in sizes if content is None), default=0)
        self._buffers = [shareable_bytes(largest, device) for _ in range(STAGED)]
        free = itertools.cycle(self._buffers)
        for (_, nbytes, *_), of_bucket, pieces, content in zip(buckets, runs, parts, direct, strict=True):
            self._firsts.append(shards[of_bucket[0].copy[4]].meta)
            if content is not None:
                self._contents.append((content, None))
                continue
            buffer, packing = next(free)[:nbytes], Copies()
            for run, part in zip(of_bucket, pieces, strict=True):
                packing.add(run.piece(buffer, shards[run.copy[4]].local.dtype), part)
            self._contents.append((buffer, packing))

    def send(self, transport: Transport | None, travels: Callable[[str], bool]) -> list[list[int]]:
        """Send the buckets of the adapters for which ``travels`` is true; return (worker, checksum) of each, in order.

        Raises RuntimeError (torch) if a worker is gone, WeightSyncError if there are buckets but no ``transport``.
        """
        if not self._contents:
            return []
        if transport is None:
            raise WeightSyncError("send: no engine is connected; call connect() first")
        in_flight: list[tuple[Tensor, Callable[[], None]]] = []
        sums: list[Tensor] = []
        workers = [worker for worker, *_ in self.transfers.buckets.tolist()]
        chosen = [number for number, meta in enumerate(self._firsts) if travels(meta.adapter)]
        for number in chosen:
            content, copies = self._contents[number]
            # A staging buffer may be filled again once it was sent. Content in place is not written during a
            # pass.
            while len(in_flight) >= AHEAD or (
                copies is not None and any(_same_memory(memory, content) for memory, _ in in_flight)
            ):
                in_flight.pop(0)[1]()
            if copies is not None:
                copies()
            sums.append(checksum(content))
            in_flight.append((content, transport.send(content, self.ranks_of[workers[number]])))
        for _, wait in in_flight:
            wait()
        # read once, at the end: reading a sum waits for the device
        totals = torch.stack(sums).tolist() if sums else []
        return [[workers[number], total] for number, total in zip(chosen, totals, strict=True)]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _made_alone(run: Run, shards: Sequence[TensorShard]) -> Iterator[Run]:
    """Yield the run, or each of its copies alone if the shard is computed when it is copied."""
    if run.count == 1 or shards[run.copy[4]].make is None:
        yield run
        return
    tensor, at, rows, columns, shard, first, *rest = run.copy
    for n in range(run.count):
        yield Run([tensor, at + n * run.bytes_stride, rows, columns, shard, first + n * run.stride, *rest], 1, 0, 0)


def _part(shard: TensorShard, run: Run) -> Tensor | Callable[[], Tensor]:
    """View the copies of a run in their shard, or return a function that computes them."""
    _, _, rows, columns, _, first, step, column = run.copy
    # checked here, because as_strided would read beyond the shard's rows without an error
    shape = shard.local.shape
    if first + (run.count - 1) * run.stride + (rows - 1) * step >= shape[0] or column + columns > shape[1]:
        raise WeightSyncError(
            f"the plan sends rows from {first} of a shard of shape {list(shape)}, which does not have them: make a "
            "new plan after weights have moved"
        )
    part = shard.part(slice(first, first + (rows - 1) * step + 1, step), slice(column, column + columns))
    return run.of(part, run.stride * shard.local.stride(0)) if isinstance(part, Tensor) else part


def _in_place(part: Tensor | Callable[[], Tensor]) -> Tensor | None:
    """View the bytes of a part in its own memory; None if it is not contiguous."""
    return part.flatten().view(torch.uint8) if isinstance(part, Tensor) and part.is_contiguous() else None


NONE = -1


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """One rank's part of the exchange. ``worker``: the worker on its GPU; :data:`NONE` if there is none."""

    worker: int = NONE
    incoming: list[tuple[int, int, str, str]] = field(default_factory=list)
    """The buckets of that worker, in order: (source rank, bytes, adapter, last tensor)."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """(bucket to send, rank that it goes to, index of the incoming bucket) of each round; :data:`NONE`: nothing."""


def plan_exchange(plan: ReshardPlan, tensors: Sequence[TensorMeta], local: Sequence[int]) -> list[ExchangeSchedule]:
    """Return the schedule of each rank. ``tensors``: in the plan's order; ``local``: worker → the rank on its GPU."""
    schedules = [ExchangeSchedule() for _ in plan.ranks]
    buckets_for: list[dict[int, list[int]]] = [defaultdict(list) for _ in plan.ranks]  # by rank: worker → its buckets
    for rank, transfers in enumerate(plan.ranks):
        for number, worker in enumerate(transfers.buckets[:, 0].tolist()):
            buckets_for[rank][worker].append(number)
    queue: list[tuple[int, int, int, int, int]] = []
    for worker, transfers in enumerate(plan.workers):
        # Both lists have one order, so the n-th bucket from a rank in the worker's list is the n-th for the
        # worker in the rank's list.
        to = local[worker]
        left = [iter(buckets_for[rank][worker]) for rank in range(len(plan.ranks))]
        incoming: list[tuple[int, int, str, str]] = []
        for rank, nbytes, *_, tensor in transfers.buckets.tolist():
            number = next(left[rank])
            if rank != to:
                queue.append((tensor, len(incoming), number, rank, to))
            incoming.append((rank, nbytes, tensors[tensor].adapter, tensors[tensor].name))
        schedules[to] = ExchangeSchedule(worker, incoming)
    rounds: list[dict[int, list[int]]] = [defaultdict(lambda: [NONE, NONE, NONE]) for _ in plan.ranks]
    sends: list[set[int]] = [set() for _ in plan.ranks]
    next_free, next_receive = [0] * len(plan.ranks), [0] * len(plan.ranks)
    # in the order of the worker's list, so that a receiver can process what arrives at once
    for _, position, number, rank, to in sorted(queue):
        # A receiver takes its buckets in this order; a sender may use any round that is still free before the
        # receiver's next one. ``next_free`` skips the rounds in use, which keeps the search short.
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
        ExchangeSchedule(
            schedule.worker,
            schedule.incoming,
            [(send, to, arrives) for _, (send, to, arrives) in sorted(turns.items())],
        )
        for schedule, turns in zip(schedules, rounds, strict=True)
    ]


class ExchangeSender(SliceSender):
    """Exchanges the buckets of a rank with other ranks, and sends those for the worker on its own GPU."""

    def __init__(
        self,
        part: ExchangeSchedule,
        transfers: TransferList,
        shards: Sequence[TensorShard],
        ranks_of: dict[int, int],
        device: torch.device,
    ) -> None:
        # the receiving process maps exported buffers, and only few can be exported (IpcTransport)
        super().__init__(transfers, shards, ranks_of, device, in_place=False)
        self.part = part
        largest = max((part.incoming[arrives][1] for *_, arrives in part.rounds if arrives != NONE), default=0)
        self._received = [shareable_bytes(largest, device) for _ in range(STAGED)]

    def send(self, transport: Transport | None, travels: Callable[[str], bool]) -> list[list[int]]:
        """Exchange and send the buckets of the adapters for which ``travels`` is true; return (worker, checksum) of
        each bucket of this rank, in order. Raises RuntimeError (torch) if a rank or the worker is gone."""
        part, own_rank = self.part, dist.get_rank()
        workers = [worker for worker, *_ in self.transfers.buckets.tolist()]
        sums: dict[int, Tensor] = {}
        in_flight: list[tuple[Tensor, Callable[[], None]]] = []
        local = iter([number for number, worker in enumerate(workers) if worker == part.worker])
        following = 0

        def wait_for(memory: Tensor) -> None:
            while any(memory_in_flight.data_ptr() == memory.data_ptr() for memory_in_flight, _ in in_flight):
                in_flight.pop(0)[1]()

        def filled(number: int) -> Tensor:
            content, copies = self._contents[number]
            wait_for(content)
            if copies is not None:
                copies()
            sums[number] = checksum(content)
            return content

        def hand_over(content: Tensor) -> None:
            assert transport is not None
            in_flight.append((content, transport.send(content, self.ranks_of[part.worker])))

        def hand_over_own(stop: int) -> None:
            """Send the worker the buckets that come from this rank itself, up to its bucket ``stop``."""
            nonlocal following
            for rank, _, adapter, _ in part.incoming[following:stop]:
                if rank == own_rank:
                    number = next(local)
                    if travels(adapter):
                        hand_over(filled(number))
            following = stop + 1

        turn = 0
        # the worker's order mixes both kinds: its buckets from this rank that come before the arriving one go
        # first
        for number, to, arrives in part.rounds:
            if arrives != NONE:
                hand_over_own(arrives)
            operations, under_way = [], []
            # both ends know which adapters travel, so both skip the same rounds
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
                # One batch for both directions: NCCL's send waits for the receiver, so two ranks that each send
                # first would wait for each other.
                for work in dist.batch_isend_irecv(operations) if operations else ():
                    work.wait()
            if buffer is not None:
                hand_over(buffer)
        hand_over_own(len(part.incoming))
        for _, wait in in_flight:
            wait()
        chosen = sorted(sums)
        totals = torch.stack([sums[number] for number in chosen]).tolist() if chosen else []
        return [[workers[number], total] for number, total in zip(chosen, totals, strict=True)]


@contextlib.contextmanager
def _named(under_way: Sequence[str]) -> Iterator[None]:
    """Name the buckets and their peers in an error of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        # a lack of memory here is not the peer's fault, and is handled by the caller
        if is_out_of_memory(error):
            raise
        raise RuntimeError(f"exchange of {' and '.join(under_way)}: {error}") from error


class Targets(Protocol):
    """The parameters of a model that is being loaded, as numbered targets."""

    def memory(self, target: int) -> Tensor:
        """Return the memory of a target, [elements] in its dtype, before it is packed for a kernel; allocate it if
        need be."""

    def complete(self, target: int) -> None:
        """Process a target once all copies into it are done."""


@dataclass(slots=True)
class _Bucket:
    number: int
    buffer: Tensor
    targets: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Views of the buffer, one for each of ``targets``; empty if the buffer is the target's own memory."""
    wait: Callable[[], None] | None = None


class _MemoryLimit:
    """Counts the bytes of buckets that were requested and not yet processed: at most ``limit``, or one bucket."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.closed = limit, 0, False
        self.changed = threading.Condition()

    def reserve(self, nbytes: int, wait: bool) -> bool:
        """Reserve ``nbytes`` and return whether that was possible. ``wait``: block until it is. Raises WeightSyncError
        once the limit is closed."""
        with self.changed:
            # ``used``: one bucket is always allowed, or a bucket above the limit would never arrive
            while not self.closed and self.used and self.used + nbytes > self.limit:
                if not wait:
                    return False
                self.changed.wait()
            if self.closed:
                raise WeightSyncError("receive: the update was stopped because a received bucket could not be loaded")
            self.used += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release ``nbytes``."""
        with self.changed:
            self.used -= nbytes
            self.changed.notify()

    def close(self) -> None:
        """End the thread that waits in :meth:`reserve`."""
        with self.changed:
            self.closed = True
            self.changed.notify()


class SliceReceiver:
    """Receives ``transfers`` from the trainer ranks of a group. ``numbers``: rank → the member that sends its buckets.

    ``dtypes``: of the plan's tensors. At most 2 · ``bucket_bytes`` are in flight or in buffers.
    """

    def __init__(
        self,
        transfers: TransferList,
        transport: Transport,
        numbers: Mapping[int, int],
        dtypes: Sequence[torch.dtype],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self.transfers, self.transport, self.numbers, self.dtypes = transfers, transport, numbers, dtypes
        self.limit, self.device = 2 * bucket_bytes, device
        self.checksums: list[list[int]] = []
        """(rank, checksum) of each bucket of the last update, in order."""
        self.received_bytes = 0
        self._sums: list[tuple[int, Tensor]] = []
        """(rank, checksum on the device) of each bucket of the update in progress."""
        self._free: list[Tensor] = []
        self._buckets = transfers.buckets.tolist()
        self._largest = max((nbytes for _, nbytes, direct, *_ in self._buckets if not direct), default=0)
        self._runs = transfers.runs()
        self._ends = _last_uses(transfers)

    def receive(self, targets: Targets, numbers: Sequence[int] | None = None) -> None:
        """Receive all buckets, or those in ``numbers``, into ``targets``. Raises WeightSyncError if a rank is gone or
        silent, or memory for a bucket is lacking.

        A second thread posts the receives and copies the buckets, because posting blocks while its connection is read.
        The caller's thread processes complete targets, which packs them.
        """
        self.checksums, self.received_bytes, self._sums = [], 0, []
        chosen = range(len(self._buckets)) if numbers is None else numbers
        taken: queue.SimpleQueue[BaseException | Callable[[], None]] = queue.SimpleQueue()
        in_flight = _MemoryLimit(self.limit)
        threading.Thread(target=self._receive_all, args=(targets, chosen, taken, in_flight), daemon=True).start()
        try:
            for number in chosen:
                copied = taken.get()
                if isinstance(copied, BaseException):
                    raise copied
                if ends := self._ends.get(number, ()):
                    copied()  # the receiving thread may use another stream
                for target in ends:
                    targets.complete(target)
                in_flight.release(self._memory_bytes(number))
        finally:
            # also after an error of a target: it wakes the thread that waits for memory
            in_flight.close()
        totals = torch.stack([total for _, total in self._sums]).tolist() if self._sums else []
        self.checksums = [[rank, total] for (rank, _), total in zip(self._sums, totals, strict=True)]

    def _receive_all(
        self,
        targets: Targets,
        numbers: Sequence[int],
        taken: queue.SimpleQueue[BaseException | Callable[[], None]],
        in_flight: _MemoryLimit,
    ) -> None:
        """Receive these buckets in order; put a mark for each, or the error, into ``taken``."""
        try:
            # the current device belongs to the thread: a new thread starts on device 0
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device)
            ahead: deque[_Bucket] = deque()
            following = 0
            for number in numbers:
                rank, nbytes, *_ = self._buckets[number]
                # With nothing under way the thread may wait for memory. Otherwise it finishes the first bucket,
                # which frees some.
                while following < len(numbers) and in_flight.reserve(
                    self._memory_bytes(numbers[following]), wait=not ahead
                ):
                    ahead.append(self._start(numbers[following], targets))
                    following += 1
                bucket = ahead.popleft()
                with self._raising(rank):
                    assert bucket.wait is not None
                    bucket.wait()
                self._take(bucket)
                self.received_bytes += nbytes
                taken.put(devices.mark())
        except BaseException as error:  # the other thread raises it
            taken.put(error)

    def close(self) -> None:
        """Leave the group and free the buffers."""
        self.transport.close()
        self._free = []

    def _memory_bytes(self, number: int) -> int:
        """Return the bytes of memory that a bucket takes while it is in flight."""
        _, nbytes, direct, *_ = self._buckets[number]
        return nbytes if direct else self._largest

    def _new(self) -> Tensor:
        return torch.empty(self._largest, dtype=torch.uint8, device=self.device)

    def _start(self, number: int, targets: Targets) -> _Bucket:
        """Start receiving a bucket, into the target's memory or into a buffer."""
        rank, nbytes, direct, *_ = self._buckets[number]
        runs = self._runs[number]
        places = [run.of(_place(targets.memory(run.copy[4]), run.copy), run.stride) for run in runs]
        if direct:
            (target,) = places
            bucket = _Bucket(number, target.as_strided((target.numel(),), (1,)).view(torch.uint8))
        else:
            with self._raising(rank):
                memory = self._free.pop() if self._free else self._new()
            bucket = _Bucket(number, memory[:nbytes], places)
            bucket.pieces = [run.piece(memory, self.dtypes[run.copy[0]]) for run in runs]
        with self._raising(rank):
            bucket.wait = self.transport.receive(bucket.buffer, self.numbers[rank])
        return bucket

    def _take(self, bucket: _Bucket) -> None:
        """Copy the pieces of a bucket to their targets, and read them back for the checksum."""
        if bucket.pieces:
            copy_all(bucket.targets, bucket.pieces)
            for target, piece in zip(bucket.targets, bucket.pieces, strict=True):
                _read_back(piece, target)
        rank = self._buckets[bucket.number][0]
        # of the memory that was copied back from the targets: the sum covers what was loaded, not only what
        # came
        self._sums.append((rank, checksum(bucket.buffer)))
        if bucket.pieces:
            # the whole buffer again: bucket.buffer is cut to the bytes of this bucket
            self._free.append(bucket.buffer.as_strided((self._largest,), (1,)))

    @contextlib.contextmanager
    def _raising(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise not_received(error, f"trainer rank {rank}", self.received_bytes) from error


def copy_all(targets: list[Tensor], pieces: list[Tensor]) -> None:
    """Copy the pieces of a bucket to their targets: pairs of one shape, [rows, columns] or [count, rows, columns]."""
    torch._foreach_copy_(targets, pieces)


def _place(memory: Tensor, copy: Sequence[int]) -> Tensor:
    """View the memory that a copy writes: [rows, columns]."""
    _, _, rows, columns, _, offset, by_row, by_column = copy
    return memory.as_strided((rows, columns), (by_row, by_column), memory.storage_offset() + offset)


def _read_back(piece: Tensor, target: Tensor) -> None:
    """Copy a target back into the piece of the bucket that it was copied from, for the checksum.

    If the target has a narrower dtype, the piece cannot be restored. Then the target is compared with the converted
    piece, and any difference inverts the bytes of the piece.
    """
    if torch.promote_types(piece.dtype, target.dtype) == target.dtype:
        piece.copy_(target)
    else:
        wrong = (target != piece.to(target.dtype)).any()
        piece.view(torch.uint8).bitwise_xor_(wrong.to(torch.uint8) * 255)


def _last_uses(transfers: TransferList) -> dict[int, list[int]]:
    """Return, by bucket, the targets that are complete after it."""
    last: dict[int, int] = {}
    for number, (*_, first, stop, _) in enumerate(transfers.buckets.tolist()):
        for target in transfers.copies[first:stop, 4].tolist():
            last[target] = number
    ends: dict[int, list[int]] = {}
    for target, number in last.items():
        ends.setdefault(number, []).append(target)
    return ends
