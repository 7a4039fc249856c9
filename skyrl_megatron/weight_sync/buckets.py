"""Buckets: tensors packed into flat byte buffers, and the worker's side of a bucketed broadcast.

A rank's metadata list the tensors that it sends, each completely or some rows of it (an expert-parallel rank owns rows
of a fused expert tensor, a pipeline stage owns its layers). :func:`plan_buckets` packs the tensors of all ranks into
buckets and puts the buckets into one order. Senders and receivers compute the plan from the same metadata.
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

ALIGNMENT = 16  # bytes: alignment of segments, sufficient for every dtype
PAGE = 4096  # bytes: the size of a buffer is a multiple of it, see checksum()


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as a rank sends it: HF name, dtype (``"float32"``), shape of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    """First row and one past the last row of dim 0 that the rank sends; None: the whole tensor."""
    position: int = -1
    """Position in the order in which all ranks process the model. −1: the position in the rank's own list.

    Ranks that gather tensors from one another must do so in this order: a rank sends its bucket only after all buckets
    before it were received, and no rank may wait for it until then.
    """
    conversion: str | None = None
    """The conversion that turns the sent tensor into the tensor on disk (``weight_sync/tensors.py``), applied by the
    engine's worker; None: they are equal."""

    @property
    def adapter(self) -> str:
        """The adapter that prefixes the name; empty for adapters without a name and for other tensors."""
        return self.name.rpartition(":")[0]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the rows that the rank sends."""
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
    """A contiguous part of one tensor in a bucket."""

    index: int
    """Index of the tensor in the sender's metadata."""
    start: int
    """First byte, counted from the start of the sender's part of the tensor."""
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
    """Plan the buckets of all senders, in the order in which they are sent.

    A tensor that does not fit into the rest of a bucket starts the next one; a tensor larger than a bucket is split.
    Buckets are ordered by the position of their last tensor in the model, so that a bucket waits only for earlier
    work. Raises WeightSyncError for a sender whose tensors are not in model order.
    """
    assert bucket_bytes % PAGE == 0, bucket_bytes
    plan: list[Bucket] = []
    for sender, metadata in enumerate(senders):
        segments: list[Segment] = []
        size, position = 0, -1
        for index, meta in enumerate(metadata):
            # −1: the sender has no order of the model, so there is nothing to violate
            if 0 <= meta.position < position:
                raise WeightSyncError(
                    f"sender {sender}: {meta.name} comes after a tensor that the model has later: list tensors in the "
                    "order of the model"
                )
            position = meta.position
            for start, nbytes in cuts(meta, bucket_bytes):
                if segments and size + nbytes > bucket_bytes:
                    plan.append(_bucket(sender, metadata, segments, size))
                    segments, size = [], 0
                segments.append(Segment(index, start, nbytes, size))
                # Tensor.view(dtype) requires an offset that is a multiple of the element size
                size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if segments:
            plan.append(_bucket(sender, metadata, segments, size))
    # Every rank and worker follows this one order. If two ranks that gather rows from each other sent in
    # different orders, each would wait for the other.
    return sorted(plan, key=lambda bucket: (bucket.position, bucket.sender))


def cuts(meta: TensorMeta, bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut the sent part of a tensor into segments (first byte, bytes) of whole rows, at most a bucket each.

    They depend only on the tensor, so all ranks that hold shards of it compute the same. Raises WeightSyncError if a
    row is larger than a bucket.
    """
    if meta.nbytes <= bucket_bytes:
        return [(0, meta.nbytes)]
    if meta.row_nbytes > bucket_bytes:
        raise WeightSyncError(
            f"bucket_bytes={bucket_bytes} is less than a row of {meta.name} ({meta.row_nbytes} bytes): raise it"
        )
    # cut between rows: shards end at rows too, so a segment needs no part of a row from two ranks
    most = bucket_bytes // meta.row_nbytes * meta.row_nbytes
    return [(start, min(most, meta.nbytes - start)) for start in range(0, meta.nbytes, most)]


def _bucket(sender: int, metadata: Sequence[TensorMeta], segments: list[Segment], size: int) -> Bucket:
    last = segments[-1]
    position = metadata[last.index].position
    place = (position if position >= 0 else last.index, last.start)
    return Bucket(sender, tuple(segments), max(-(-size // PAGE) * PAGE, PAGE), place)


def checksum(buffer: Tensor) -> Tensor:
    """Compute a 64-bit checksum ([] int64) of a buffer ([n · PAGE] uint8), the same on CPU and CUDA.

    The bytes are read as a matrix of int64 words, 512 per row. The sums of its rows and of its columns, each times an
    odd number that depends on the position, are added modulo 2⁶⁴. A flipped bit, a lost or stale part, and any two
    exchanged words change it. It costs two passes over the memory.
    """
    # Integer sums wrap modulo 2⁶⁴ in any order of addition, so CPU and CUDA agree. Sums of floats would not.
    words = buffer.view(torch.int64).view(-1, PAGE // 8)
    by_row, by_column = words.sum(1), words.sum(0)
    return (by_row * _odd(by_row, 0x5851F42D4C957F2D)).sum() + (by_column * _odd(by_column, 0x2545F4914F6CDD1D)).sum()


def _odd(like: Tensor, multiplier: int) -> Tensor:
    places = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    # odd, so it has an inverse modulo 2⁶⁴: the product of a difference with it is never 0
    return places * multiplier | 1


KEPT = 3
"""Buffers that are kept between two updates: one that is loaded from, one that is received into, and the previous one,
whose last tensor a loader's loop may still hold."""


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    idle: int
    """Reference count of its memory when it is unused."""
    content: tuple[int, int] | None = None
    """(number, bytes) of the content whose checksum is still to be computed; None: there is none."""
    read: Callable[[], None] | None = None
    """Waits until the device has read it; None while it is in use."""


class BufferPool:
    """The buffers of one receiver. One thread fills them; another thread, the consumer, loads from them.

    A freed tensor does not mean that the device is done: the consumer's copies are queued on the consumer's stream,
    and the filling thread uses another stream. So a buffer is free once nothing refers to it *and* the consumer has
    then recorded an event on its stream (:meth:`retire`). It is filled again after that event.

    ``leaving(number, buffer)`` is called with the content of a buffer after the last copy out of it and before it is
    overwritten or freed.
    """

    def __init__(self, on: torch.device, leaving: Callable[[int, Tensor], None]) -> None:
        self.device, self._leaving = on, leaving
        self._buffers: list[_Buffer] = []
        self._changing = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pool holds."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def take(self, number: int, nbytes: int) -> Tensor:
        """Return a buffer, [nbytes] uint8, for content ``number``: a free one, else a new one."""
        with self._changing:  # once a view of it exists, retire() sees that it is in use
            free = next((b for b in self._buffers if b.read is not None and b.memory.numel() >= nbytes), None)
            if free is None:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                free = _Buffer(memory, _references(memory))
                self._buffers.append(free)
            read, free.read = free.read, None
            view = free.memory[:nbytes]
        # outside of the lock, because it may wait for the device, and retire() must not
        self._leave(free, read)
        free.content = number, nbytes
        return view

    def retire(self) -> None:
        """Free the buffers that nothing refers to any more, after the work queued so far. Call it on the consumer's
        thread.

        The event is recorded after the references are counted, so it follows the copies of those who dropped them.
        """
        with self._changing:
            # The storage is asked, not Python: views that a loader keeps are other tensors of the same storage.
            idle = [b for b in self._buffers if b.read is None and _references(b.memory) == b.idle]
            if idle:
                reached = device.mark()
                for buffer in idle:
                    buffer.read = reached

    def trim(self) -> None:
        """End an update: wait for the device, and free all but :data:`KEPT` buffers. Call it on the consumer's
        thread."""
        reached = device.mark()
        for buffer in self._buffers:
            self._leave(buffer, reached)
            buffer.read = reached
        free = [buffer for buffer in self._buffers if _references(buffer.memory) == buffer.idle]
        self._buffers = free[:KEPT]

    def _leave(self, buffer: _Buffer, read: Callable[[], None] | None) -> None:
        """Wait until the device has read a buffer, and pass its content to ``leaving``."""
        if buffer.content is not None and read is not None:
            read()
            number, nbytes = buffer.content
            self._leaving(number, buffer.memory[:nbytes])
            buffer.content = None


def _references(memory: Tensor) -> int:
    """Return torch's reference count of the storage. Views that loaders keep count too."""
    storage = memory.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class WeightReceiver:
    """One worker's side of the groups of all senders. Call :meth:`tensors`, then :meth:`finish`.

    While the model loads from one bucket, a thread receives the next. Loaders keep references into buckets until a
    module is complete. A buffer is reused once it has been read (:class:`BufferPool`), so memory holds at most three
    buckets and the tensors of incomplete modules.
    """

    def __init__(self, transports: Sequence[Transport], bucket_bytes: int, device: torch.device) -> None:
        self.transports, self.bucket_bytes, self.device = transports, bucket_bytes, device
        self.checksums: list[list[int]] = []
        """Checksums of what the last update loaded: per sender, per bucket."""
        self.received_bytes = 0
        """Bytes of the current or last update."""
        self.senders: Sequence[Sequence[TensorMeta]] = []
        """Metadata of the tensors of each sender."""
        self._buckets: list[Bucket] = []
        self._sums: dict[int, int] = {}  # bucket → checksum of the content after it was read
        self._buffers = BufferPool(device, self._sum)

    def set_metadata(self, senders: Sequence[Sequence[TensorMeta]]) -> None:
        """Set what each sender will send, in the order of the transports."""
        if len(senders) != len(self.transports):
            raise WeightSyncError(
                f"weight metadata of {len(senders)} ranks, {len(self.transports)} are connected: connect all senders "
                "before an update"
            )
        self.senders = senders
        self._buckets = plan_buckets(senders, self.bucket_bytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive all tensors of the metadata; yield (HF name, whole tensor [shape of its metadata], in the dtype of
        its metadata), each as soon as it is complete.

        A tensor that is in one bucket is a view of it. Raises WeightSyncError if a sender is gone or silent, or memory
        for a bucket is lacking.
        """
        self.checksums, self.received_bytes = [[] for _ in self.senders], 0
        unfinished: dict[str, tuple[Tensor, int]] = {}
        for bucket, buffer in self._received():
            for segment in bucket.segments:
                meta = self.senders[bucket.sender][segment.index]
                data = buffer[segment.offset : segment.offset + segment.nbytes]
                # other buckets or other senders have the rest: the tensor is put together in memory of its own
                if segment.nbytes != meta.whole_nbytes:
                    if meta.name not in unfinished:
                        unfinished[meta.name] = self._empty(meta), meta.whole_nbytes
                    assembled, missing = unfinished.pop(meta.name)
                    start = meta.first_byte + segment.start
                    assembled[start : start + segment.nbytes].copy_(data)
                    missing -= segment.nbytes
                    if missing:
                        unfinished[meta.name] = assembled, missing
                        continue
                    data = assembled
                yield meta.name, data.view(meta.torch_dtype).view(meta.shape)
            del buffer, data  # the last references held here: the buffer may be reused
        if unfinished:
            raise WeightSyncError(
                f"the trainer did not send all parts of {', '.join(sorted(unfinished))}: every rank that lists rows "
                "of a tensor must send in the same update"
            )

    def finish(self) -> None:
        """Collect the checksums after all tensors are loaded, and free the buffers that the next update does not need.

        A checksum is computed after the last copy out of the bucket, so it covers what was loaded, not only what was
        received. Raises WeightSyncError if the loader did not consume all tensors.
        """
        self._buffers.trim()
        if len(self._sums) < len(self._buckets):
            raise WeightSyncError(
                f"the model loaded {len(self._sums)} of {len(self._buckets)} buckets of weights: its load_weights "
                "must consume every tensor"
            )
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
        """Yield buckets with their bytes; the next is received while the consumer uses one."""
        ahead: queue.Queue[tuple[Bucket, Tensor] | BaseException | None] = queue.Queue()
        # one bucket that the consumer loads from, and one that is received meanwhile
        slots = threading.Semaphore(2)
        stopped = threading.Event()

        def receive() -> None:
            try:
                # the current device belongs to the thread: a new thread starts on device 0
                if self.device.type != "cpu":
                    torch.accelerator.set_device_index(self.device)
                for number, bucket in enumerate(self._buckets):
                    slots.acquire()
                    # the consumer stopped; its ``finally`` released the slot that this thread waited for
                    if stopped.is_set():
                        return
                    buffer = self._buffers.take(number, bucket.nbytes)
                    self.transports[bucket.sender].broadcast(buffer)()
                    devices.mark()()  # the consumer uses another stream
                    ahead.put((bucket, buffer))
                    del buffer
                ahead.put(None)
            except BaseException as error:
                # BaseException: whatever ends this thread, the consumer waits for the queue without a deadline
                ahead.put(error)

        threading.Thread(target=receive, name="weights", daemon=True).start()
        try:
            while (item := ahead.get()) is not None:
                if isinstance(item, BaseException):
                    raise not_received(item, "a trainer rank", self.received_bytes) from item
                bucket, buffer = item
                self.received_bytes += bucket.nbytes
                yield bucket, buffer
                # these names would keep the buffer from being free
                del item, buffer
                self._buffers.retire()
                slots.release()
        finally:
            stopped.set()
            slots.release()
