"""A worker's end of a sync by routes: buckets are received while those before them are copied to their places.

What is checked is in its place already: the copies of a bucket are read back into its buffer, whose checksum is then
that of the targets' memory, before anything packs it for a kernel. A bucket that is one contiguous copy is received in
place. The device computes checksums as it goes; they are read once, at the end of an update.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from skyrl_megatron import device as devices
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import checksum
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.transport import Transport, not_received


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
