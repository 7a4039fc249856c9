"""A worker's end of a sync by routes: buckets are received while those before them are copied to their places.

What is checked lies where it was copied to: the copies of a bucket are read back into its buffer, whose checksum is
then that of the targets' memory, before anything packs it for a kernel. A bucket that is one contiguous copy is
received in place.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from skyrl_megatron import device as devices
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import checksum
from skyrl_megatron.weight_sync.parcels import Parcels
from skyrl_megatron.weight_sync.transport import Transport, first_line


class Targets(Protocol):
    """The memory of a model that is being loaded."""

    def memory(self, target: int) -> Tensor:
        """Return a target as it is before it is packed for a kernel; its memory exists from now on."""

    def complete(self, target: int) -> None:
        """Go on with a target that everything was copied to."""


@dataclass(slots=True)
class _Bucket:
    rank: int
    buffer: Tensor
    targets: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Views of the buffer, one for each of ``targets``; none where it is the target's own memory."""
    arrived: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class ParcelReceiver:
    """Receives ``parcels`` from trainer ranks (rank → its transport).

    ``dtypes``: of the tensors that ``parcels`` number. At most ``bucket_bytes`` · 2 are under way or in buffers.
    """

    def __init__(
        self,
        parcels: Parcels,
        transports: Mapping[int, Transport],
        dtypes: Sequence[torch.dtype],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self.parcels, self.transports, self.dtypes = parcels, transports, dtypes
        self.limit, self.device = 2 * bucket_bytes, device
        self.checksums: list[list[int]] = []
        """(rank, checksum) of every bucket of the last update, in order."""
        self.received_bytes = 0
        self._free: list[Tensor] = []
        self._buckets = parcels.buckets.tolist()
        self._largest = max((nbytes for _, nbytes, direct, *_ in self._buckets if not direct), default=0)
        self._ends = _last_uses(parcels)

    def receive(self, targets: Targets) -> None:
        """Receive everything into ``targets``. Raises WeightSyncError when a rank is gone or silent."""
        self.checksums, self.received_bytes = [], 0
        wanted: queue.Queue[_Bucket | None] = queue.Queue()
        threading.Thread(target=self._work, args=(wanted,), name="weights", daemon=True).start()
        ahead: deque[_Bucket] = deque()
        following = under_way = 0
        try:
            for number, (_, nbytes, *_) in enumerate(self._buckets):
                while following < len(self._buckets):
                    size = self._buckets[following][1]
                    if ahead and under_way + size > self.limit:
                        break
                    ahead.append(self._prepared(following, targets))
                    wanted.put(ahead[-1])
                    following, under_way = following + 1, under_way + size
                bucket = ahead.popleft()
                bucket.arrived.wait()
                if bucket.error is not None:
                    raise WeightSyncError(
                        f"receive: trainer rank {bucket.rank} is gone or silent after "
                        f"{self.received_bytes / 1e6:.1f} MB: {first_line(bucket.error)}"
                    ) from bucket.error
                self._take(bucket)
                self.received_bytes, under_way = self.received_bytes + nbytes, under_way - nbytes
                for target in self._ends.get(number, ()):
                    targets.complete(target)
        finally:
            wanted.put(None)

    def close(self) -> None:
        """Leave the groups and free the buffers."""
        for transport in self.transports.values():
            transport.close()
        self._free = []

    def _prepared(self, number: int, targets: Targets) -> _Bucket:
        """Find the memory that a bucket is received into, and where its pieces belong."""
        rank, nbytes, direct, first, stop, _ = self._buckets[number]
        copies = self.parcels.copies[first:stop].tolist()
        places = [_place(targets.memory(copy[4]), copy) for copy in copies]
        if direct:
            (place,) = places
            return _Bucket(rank, place.as_strided((place.numel(),), (1,)).view(torch.uint8))
        memory = self._free.pop() if self._free else torch.empty(self._largest, dtype=torch.uint8, device=self.device)
        bucket = _Bucket(rank, memory[:nbytes], places)
        for tensor, at, rows, columns, *_ in copies:
            dtype = self.dtypes[tensor]
            piece = memory[at : at + rows * columns * dtype.itemsize]
            bucket.pieces.append(piece.view(dtype).view(rows, columns))
        return bucket

    def _take(self, bucket: _Bucket) -> None:
        """Copy a bucket's pieces to their places, and read them back for the checksum."""
        if bucket.pieces:
            copy_all(bucket.targets, bucket.pieces)
            for target, piece in zip(bucket.targets, bucket.pieces, strict=True):
                _read_back(piece, target)
        self.checksums.append([bucket.rank, int(checksum(bucket.buffer))])  # int() waits for the device
        if bucket.pieces:
            self._free.append(bucket.buffer.as_strided((self._largest,), (1,)))

    def _work(self, wanted: queue.Queue[_Bucket | None]) -> None:
        """Receive what is asked for, one bucket after the other."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        failed: BaseException | None = None
        while (bucket := wanted.get()) is not None:
            try:
                if failed is None:
                    self.transports[bucket.rank].receive(bucket.buffer)()
                    devices.mark()()  # the consumer has a stream of its own
            except BaseException as error:
                failed = error
            bucket.error = failed
            bucket.arrived.set()


def copy_all(targets: list[Tensor], pieces: list[Tensor]) -> None:
    """Copy the pieces of a bucket to their places."""
    torch._foreach_copy_(targets, pieces)


def _place(memory: Tensor, copy: Sequence[int]) -> Tensor:
    """View where a copy belongs: [rows, columns]."""
    _, _, rows, columns, _, offset, by_row, by_column = copy
    return memory.as_strided((rows, columns), (by_row, by_column), offset)


def _read_back(piece: Tensor, target: Tensor) -> None:
    """Put what a target has into the piece that it was copied from. One that lost bits of a wider type on the way is
    compared with what it should have become."""
    if torch.promote_types(piece.dtype, target.dtype) == target.dtype:
        piece.copy_(target)
    elif not torch.equal(target, piece.to(target.dtype)):
        piece.view(torch.uint8).bitwise_not_()


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
