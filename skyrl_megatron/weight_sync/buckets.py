"""Buckets: tensors in flat byte buffers, laid out alike on all sides, and the worker's end of a bucketed broadcast.

A rank's metadata list the tensors it sends, each whole or some rows of it (an expert-parallel rank owns rows of a
fused expert tensor, a pipeline stage its layers). :func:`plan_buckets` cuts the tensors of all ranks into buckets and
puts the buckets into one order. Senders and receivers compute the plan from the same metadata.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron import device as devices
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.transport import Transport, not_received

ALIGNMENT = 16  # bytes: every segment starts where any dtype may be viewed
PAGE = 4096  # bytes: size of a buffer is a multiple, see checksum()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as a rank sends it: HF name, dtype (``"float32"``), shape of the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    """First row and row after the last of dim 0 that the rank sends; None: the whole tensor."""
    position: int = -1
    """Place in the order in which all ranks walk through the model. −1: the place in the rank's own list.

    When ranks gather tensors from one another, the order in which they do so has to agree with this one: a rank waits
    with its bucket until all buckets before it were received, and must not be needed meanwhile.
    """
    turned: str | None = None
    """What the engine's worker makes the tensor on disk with (``weight_sync/tensors.py``); None: it is that
    already."""

    @property
    def adapter(self) -> str:
        """Name of the adapter that it belongs to, in front of its own; of others and those without a name empty."""
        return self.name.rpartition(":")[0]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what the rank sends."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes that the rank sends."""
        return torch.Size(self.shard_shape).numel() * self.torch_dtype.itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def first_byte(self) -> int:
        """Where the rank's rows start in the whole tensor, in bytes."""
        if self.rows is None:
            return 0
        return self.rows[0] * torch.Size(self.shape[1:]).numel() * self.torch_dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, a step along the dimension before the last; of one element for vectors."""
        return torch.Size(self.shape[1:][-1:]).numel() * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one tensor in a bucket."""

    index: int
    """Which of the sender's tensors, by its place in the metadata."""
    start: int
    """First byte within what the sender sends of the tensor."""
    nbytes: int
    offset: int
    """First byte within the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One buffer of one sender. ``nbytes`` includes the padding of its segments."""

    sender: int
    segments: tuple[Segment, ...]
    nbytes: int
    position: tuple[int, int]


def plan_buckets(senders: Sequence[Sequence[TensorMeta]], bucket_bytes: int) -> list[Bucket]:
    """Plan the buckets of all senders, in the order in which they travel.

    A tensor that does not fit into what is left of a bucket starts the next one; one larger than a bucket is cut into
    several. Buckets are ordered by the place of their last tensor in the model, so that every bucket only waits
    for work that lies before it. Raises WeightSyncError for a sender whose tensors are not in the order of the model.
    """
    assert bucket_bytes % PAGE == 0, bucket_bytes
    plan: list[Bucket] = []
    for sender, metadata in enumerate(senders):
        segments: list[Segment] = []
        size, place = 0, -1
        for index, meta in enumerate(metadata):
            if 0 <= meta.position < place:
                raise WeightSyncError(f"sender {sender}: {meta.name} comes after a tensor that the model has later")
            place = meta.position
            for start, nbytes in cuts(meta, bucket_bytes):
                if segments and size + nbytes > bucket_bytes:
                    plan.append(_bucket(sender, metadata, segments, size))
                    segments, size = [], 0
                segments.append(Segment(index, start, nbytes, size))
                size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if segments:
            plan.append(_bucket(sender, metadata, segments, size))
    return sorted(plan, key=lambda bucket: (bucket.position, bucket.sender))


def cuts(meta: TensorMeta, bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut what is sent of a tensor into stretches, (first byte, bytes): whole rows, at most a bucket each.

    They depend on nothing but the tensor, so that ranks that hold shards of it know them too. Raises WeightSyncError
    when a row is larger than a bucket.
    """
    if meta.nbytes <= bucket_bytes:
        return [(0, meta.nbytes)]
    if meta.row_nbytes > bucket_bytes:
        raise WeightSyncError(
            f"bucket_bytes={bucket_bytes} is less than a row of {meta.name} ({meta.row_nbytes} bytes): raise it"
        )
    most = bucket_bytes // meta.row_nbytes * meta.row_nbytes
    return [(start, min(most, meta.nbytes - start)) for start in range(0, meta.nbytes, most)]


def _bucket(sender: int, metadata: Sequence[TensorMeta], segments: list[Segment], size: int) -> Bucket:
    last = segments[-1]
    position = metadata[last.index].position
    place = (position if position >= 0 else last.index, last.start)
    return Bucket(sender, tuple(segments), max(-(-size // PAGE) * PAGE, PAGE), place)


def checksum(buffer: Tensor) -> Tensor:
    """Compute a 64-bit checksum ([] int64) of a buffer ([n · PAGE] uint8), the same on CPU and CUDA.

    The bytes are read as a matrix of int64 words, 512 to the row. Sums over its rows and over its columns, each times
    an odd number that depends on the place, are added modulo 2⁶⁴: a flipped bit, a lost or stale stretch and any two
    exchanged words change it, at two passes over the memory and nothing else.
    """
    words = buffer.view(torch.int64).view(-1, PAGE // 8)
    by_row, by_column = words.sum(1), words.sum(0)
    return (by_row * _odd(by_row, 0x5851F42D4C957F2D)).sum() + (by_column * _odd(by_column, 0x2545F4914F6CDD1D)).sum()


def _odd(like: Tensor, multiplier: int) -> Tensor:
    places = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    return places * multiplier | 1


KEPT = 3
"""Buffers that stay between two updates: one that is loaded from, one that is received into, and the one before them,
whose last tensor a loader's loop still holds."""


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    idle: int
    """References to its memory when nobody uses it."""
    content: tuple[int, int] | None = None
    """Number of what is in it, and its bytes; None: nothing that is still to be checked."""
    read: Callable[[], None] | None = None
    """Waits until the device has read it; None: it is in use."""


class BufferPool:
    """Buffers of one receiver. One thread fills them, another, the consumer, loads from them.

    A tensor that is gone says nothing about the device: the consumer's copies out of it are queued on the consumer's
    stream, which may be far behind, and the thread that fills buffers has a stream of its own. So a buffer is free
    once nothing refers to it *and* the consumer has then marked its stream (:meth:`retire`), and it is filled again
    when that mark has been reached.

    ``leaving(number, buffer)`` gets the content of a buffer after the last copy out of it and before it is overwritten
    or freed.
    """

    def __init__(self, on: torch.device, leaving: Callable[[int, Tensor], None]) -> None:
        self.device, self._leaving = on, leaving
        self._buffers: list[_Buffer] = []
        self._changing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that the pool holds."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def take(self, number: int, nbytes: int) -> Tensor:
        """Return a buffer, [nbytes] uint8, for content ``number``: a free one that was read, else a new one."""
        with self._changing:  # once there is a view of it, retire() sees that it is in use
            free = next((b for b in self._buffers if b.read is not None and b.memory.numel() >= nbytes), None)
            if free is None:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                free = _Buffer(memory, _references(memory))
                self._buffers.append(free)
            read, free.read = free.read, None
            view = free.memory[:nbytes]
        self._leave(free, read)
        free.content = number, nbytes
        return view

    def retire(self) -> None:
        """Mark what nothing refers to any more as read, as soon as the work queued so far is done. Consumer's thread.

        The mark comes after the look at the references, and what dropped them had queued its copies before.
        """
        with self._changing:
            idle = [b for b in self._buffers if b.read is None and _references(b.memory) == b.idle]
            if idle:
                reached = device.mark()
                for buffer in idle:
                    buffer.read = reached

    def trim(self) -> None:
        """End an update: wait for the device, and give back all but :data:`KEPT` buffers. Consumer's thread."""
        reached = device.mark()
        for buffer in self._buffers:
            self._leave(buffer, reached)
            buffer.read = reached
        free = [buffer for buffer in self._buffers if _references(buffer.memory) == buffer.idle]
        self._buffers = free[:KEPT]

    def _leave(self, buffer: _Buffer, read: Callable[[], None] | None) -> None:
        """Wait until the device has read a buffer, and hand its content out for the last time."""
        if buffer.content is not None and read is not None:
            read()
            number, nbytes = buffer.content
            self._leaving(number, buffer.memory[:nbytes])
            buffer.content = None


def _references(memory: Tensor) -> int:
    """Count the tensors that live in the memory, as torch does: views that loaders keep count too."""
    storage = memory.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class WeightReceiver:
    """One worker's ends of the groups of all senders.

    While the model loads from one bucket, a thread receives the next. Loaders keep references into buckets until a
    module is whole; a buffer is used again once it has been read (:class:`BufferPool`), so that three buckets and
    the tensors of unfinished modules are held at most. :meth:`tensors`, then :meth:`finish`.
    """

    def __init__(self, transports: Sequence[Transport], bucket_bytes: int, device: torch.device) -> None:
        self.transports, self.bucket_bytes, self.device = transports, bucket_bytes, device
        self.checksums: list[list[int]] = []
        """Checksums of what was loaded in the last update: per sender, per bucket."""
        self.received_bytes = 0
        """Bytes of the update in progress, or of the last one."""
        self.senders: Sequence[Sequence[TensorMeta]] = []
        """What each sender sends."""
        self._buckets: list[Bucket] = []
        self._sums: dict[int, int] = {}  # bucket → checksum of what was read out of it
        self._buffers = BufferPool(device, self._sum)

    def set_metadata(self, senders: Sequence[Sequence[TensorMeta]]) -> None:
        """Take what each sender will send, in the order of the transports."""
        if len(senders) != len(self.transports):
            raise WeightSyncError(f"weight metadata of {len(senders)} ranks, {len(self.transports)} are connected")
        self.senders = senders
        self._buckets = plan_buckets(senders, self.bucket_bytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive everything that the metadata list: (name, whole tensor), each as soon as it is whole.

        A tensor is a view into a bucket if it lies in one. Raises WeightSyncError when a sender is gone or silent,
        or there is no memory for a bucket.
        """
        self.checksums, self.received_bytes = [[] for _ in self.senders], 0
        unfinished: dict[str, tuple[Tensor, int]] = {}
        for bucket, buffer in self._received():
            for segment in bucket.segments:
                meta = self.senders[bucket.sender][segment.index]
                data = buffer[segment.offset : segment.offset + segment.nbytes]
                if segment.nbytes != meta.whole_nbytes:
                    if meta.name not in unfinished:
                        unfinished[meta.name] = self._empty(meta), meta.whole_nbytes
                    whole, missing = unfinished.pop(meta.name)
                    start = meta.first_byte + segment.start
                    whole[start : start + segment.nbytes].copy_(data)
                    missing -= segment.nbytes
                    if missing:
                        unfinished[meta.name] = whole, missing
                        continue
                    data = whole
                yield meta.name, data.view(meta.torch_dtype).view(meta.shape)
            del buffer, data  # the last references held here: the buffer may be used again
        if unfinished:
            raise WeightSyncError(f"parts of {', '.join(sorted(unfinished))} were never sent")

    def finish(self) -> None:
        """Take the checksums, once all tensors are loaded, and free the buffers that the next update does not need.

        A bucket's is of what lies in its buffer after the last copy out of it, so that it covers what was loaded and
        not only what arrived. Raises WeightSyncError when the loader did not ask for everything.
        """
        self._buffers.trim()
        if len(self._sums) < len(self._buckets):
            raise WeightSyncError(f"the model took {len(self._sums)} of {len(self._buckets)} buckets of weights")
        self.checksums = [[] for _ in self.senders]
        for number, bucket in enumerate(self._buckets):
            self.checksums[bucket.sender].append(self._sums[number])

    def close(self) -> None:
        """Leave the groups and free the buffers. Senders that wait for this worker get an error."""
        for transport in self.transports:
            transport.close()
        self._buffers = BufferPool(self.device, self._sum)

    def _sum(self, number: int, buffer: Tensor) -> None:
        self._sums[number] = int(checksum(buffer))  # int() waits for the device

    def _empty(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.whole_nbytes, dtype=torch.uint8, device=self.device)

    def _received(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield buckets with their bytes; one is received while the consumer has another."""
        ahead: queue.Queue[tuple[Bucket, Tensor] | BaseException | None] = queue.Queue()
        room = threading.Semaphore(2)
        stopped = threading.Event()

        def receive() -> None:
            try:
                if self.device.type != "cpu":
                    torch.accelerator.set_device_index(self.device)
                for number, bucket in enumerate(self._buckets):
                    room.acquire()
                    if stopped.is_set():
                        return
                    buffer = self._buffers.take(number, bucket.nbytes)
                    self.transports[bucket.sender].broadcast(buffer)()
                    devices.mark()()  # the consumer has a stream of its own
                    ahead.put((bucket, buffer))
                    del buffer
                ahead.put(None)
            except BaseException as error:
                ahead.put(error)

        threading.Thread(target=receive, name="weights", daemon=True).start()
        try:
            while (item := ahead.get()) is not None:
                if isinstance(item, BaseException):
                    raise not_received(item, "a trainer rank", self.received_bytes) from item
                bucket, buffer = item
                self.received_bytes += bucket.nbytes
                yield bucket, buffer
                del item, buffer
                self._buffers.retire()
                room.release()
        finally:
            stopped.set()
            room.release()
