"""The receiving side of a weight update, inside an engine's worker process. Knows no vLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from skyrl_megatron import device as devices
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import Bucket, TensorMeta, checksum, plan_buckets
from skyrl_megatron.weight_sync.buffers import BufferPool
from skyrl_megatron.weight_sync.transport import Transport, not_received


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
