"""The receiving side of a weight update, inside an engine's worker process. Knows no vLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import Bucket, TensorMeta, checksum, plan_buckets
from skyrl_megatron.weight_sync.transport import Transport, first_line


class WeightReceiver:
    """One worker's ends of the groups of all senders.

    While the model loads from one bucket, a thread receives the next. Loaders keep references into buckets until a
    module is whole; a buffer is used again once nothing refers to it, so that at most two buckets and the tensors of
    unfinished modules are held.
    """

    def __init__(self, transports: Sequence[Transport], bucket_bytes: int, device: torch.device) -> None:
        self.transports, self.bucket_bytes, self.device = transports, bucket_bytes, device
        self.checksums: list[list[int]] = []
        """Checksums of the last update: per sender, per bucket."""
        self.received_bytes = 0
        """Bytes of the update in progress, or of the last one."""
        self._senders: Sequence[Sequence[TensorMeta]] = []
        self._buckets: list[Bucket] = []
        self._buffers = _BufferPool(device)

    def set_metadata(self, senders: Sequence[Sequence[TensorMeta]]) -> None:
        """Take what each sender will send, in the order of the transports."""
        if len(senders) != len(self.transports):
            raise WeightSyncError(f"weight metadata of {len(senders)} ranks, {len(self.transports)} are connected")
        self._senders = senders
        self._buckets = plan_buckets(senders, self.bucket_bytes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive everything that the metadata list: (name, whole tensor), each as soon as it is whole.

        A tensor is a view into a bucket if it lies in one. Checksums are taken before anything of a bucket is yielded.
        Raises WeightSyncError when a sender is gone or silent.
        """
        self.checksums, self.received_bytes = [[] for _ in self._senders], 0
        unfinished: dict[str, tuple[Tensor, int]] = {}
        for bucket, buffer in self._received():
            for segment in bucket.segments:
                meta = self._senders[bucket.sender][segment.index]
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

    def close(self) -> None:
        """Leave the groups and free the buffers. Senders that wait for this worker get an error."""
        for transport in self.transports:
            transport.close()
        self._buffers = _BufferPool(self.device)

    def _empty(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.whole_nbytes, dtype=torch.uint8, device=self.device)

    def _received(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield buckets with their bytes; one is received while the consumer has another."""
        ahead: queue.Queue[tuple[Bucket, Tensor, int] | BaseException | None] = queue.Queue()
        room = threading.Semaphore(2)
        stopped = threading.Event()

        def receive() -> None:
            try:
                if self.device.type != "cpu":
                    torch.accelerator.set_device_index(self.device)
                for bucket in self._buckets:
                    room.acquire()
                    if stopped.is_set():
                        return
                    buffer = self._buffers.take(bucket.nbytes)
                    self.transports[bucket.sender].broadcast(buffer)()
                    ahead.put((bucket, buffer, int(checksum(buffer))))  # int() waits for the device
                    del buffer
                ahead.put(None)
            except BaseException as error:
                ahead.put(error)

        threading.Thread(target=receive, name="weights", daemon=True).start()
        try:
            while (item := ahead.get()) is not None:
                if isinstance(item, BaseException):
                    raise WeightSyncError(
                        f"receive: a trainer rank is gone or silent after {self.received_bytes / 1e6:.1f} MB: "
                        f"{first_line(item)}"
                    ) from item
                bucket, buffer, total = item
                self.checksums[bucket.sender].append(total)
                self.received_bytes += bucket.nbytes
                yield bucket, buffer
                del item, buffer
                room.release()
        finally:
            stopped.set()
            room.release()


class _BufferPool:
    """Buffers that are taken again once no tensor lives in them any more."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[tuple[Tensor, int]] = []  # (buffer, references to its memory when nobody uses it)

    def take(self, nbytes: int) -> Tensor:
        """Return a free buffer, [nbytes] uint8."""
        for buffer, idle in self._buffers:
            if buffer.numel() >= nbytes and _references(buffer) == idle:
                return buffer[:nbytes]
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._buffers.append((buffer, _references(buffer)))
        return buffer[:nbytes]


def _references(buffer: Tensor) -> int:
    """Count the tensors that live in the buffer's memory, as torch does: views that loaders keep count too."""
    storage = buffer.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
