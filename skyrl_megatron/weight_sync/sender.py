"""The sending side of a weight update, in a trainer rank: every rank sends the tensors it owns, bucket by bucket.

Order of a sync, driven from outside (engines and ranks are told concurrently)::

    once:   sender.metadata() of every rank; sender.listen(…); sender.connect(…) ‖ engine.connect_weights(…)
    each:   engine.pause → engine.start_update → engine.receive_weights(metadata) ‖ sender.send() of every rank
            → checksums of both sides compared → engine.finish_update(version) → engine.resume

A rank's broadcasts wait for the receivers, which take the buckets of all ranks in one order (``bucket.py``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.errors import EngineGoneError, WeightSyncError
from skyrl_megatron.weight_sync.bucket import DEFAULT_BUCKET_BYTES, TensorMeta, checksum, plan_buckets
from skyrl_megatron.weight_sync.source import BucketWriter, PassSource, WeightSource
from skyrl_megatron.weight_sync.transport import (
    DEFAULT_TIMEOUT_S,
    Transport,
    default_transport,
    first_line,
    listen,
    open_transport,
)


class WeightSender:
    """Sends what ``source`` yields. Names, shapes, types and order of a pass must not change between syncs.

    ``source``: a :class:`~skyrl_megatron.weight_sync.source.WeightSource`, or a function that makes a pass over
    (HF name, tensor). Two buckets of memory are held from the first sync to :meth:`close`.
    """

    def __init__(
        self,
        source: WeightSource | Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        transport: str | None = None,
    ) -> None:
        self.source: WeightSource = source if hasattr(source, "metadata") else PassSource(source)
        self.bucket_bytes = bucket_bytes
        self.transport_name = transport or default_transport()
        self.sent_bytes = 0
        """Of the sync in progress, or of the last one."""
        self._listener: socket.socket | None = None
        self._transport: Transport | None = None
        self._buffers: list[Tensor] = []

    def metadata(self) -> Sequence[TensorMeta]:
        """What this rank will send, in order. May be a collective the first time: all ranks call together."""
        return self.source.metadata()

    def listen(self, host: str) -> tuple[str, int]:
        """Take a free port of ``host``; returns the address for the receivers."""
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def connect(self, host: str, port: int, receivers: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Open this rank's group and wait for its receivers (worker ranks of all engines). Replaces an earlier one.

        No later wait of this group lasts longer than ``timeout_s`` either. Raises EngineGoneError.
        """
        self.close()
        listener, self._listener = self._listener, None
        try:
            self._transport = open_transport(self.transport_name, host, port, 0, receivers + 1, timeout_s, listener)
        except (RuntimeError, OSError) as error:
            raise EngineGoneError(
                f"connect: not all of {receivers} engine workers reached {host}:{port} within {timeout_s:.0f} s: "
                f"{first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave the group and free the buckets."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._buffers = None, []

    def send(self) -> list[int]:
        """Send every bucket; returns their checksums, in order. The next bucket is filled while one travels.

        Raises WeightSyncError when the source is not as announced, EngineGoneError when a receiver is gone or silent.
        The group is then closed: receivers get an error too, and it has to be made anew.
        """
        if self._transport is None:
            raise WeightSyncError("send: no engine is connected: connect() comes first")
        try:
            return self._send(self._transport)
        except BaseException:
            self.close()
            raise

    def _send(self, transport: Transport) -> list[int]:
        buckets = plan_buckets([self.metadata()], self.bucket_bytes)
        writer, sums = BucketWriter(self.source), []
        total, self.sent_bytes = sum(bucket.nbytes for bucket in buckets), 0
        self._allocate(max((bucket.nbytes for bucket in buckets), default=0))
        travelling: list[tuple[Callable[[], None], int]] = []

        def arrived() -> None:
            wait, nbytes = travelling.pop(0)
            try:
                wait()
            except RuntimeError as error:
                raise EngineGoneError(
                    f"send: an engine worker is gone or silent after {self.sent_bytes / 1e6:.1f} of "
                    f"{total / 1e6:.1f} MB: {first_line(error)}"
                ) from error
            self.sent_bytes += nbytes

        for number, bucket in enumerate(buckets):
            if len(travelling) == len(self._buffers):
                arrived()
            buffer = self._buffers[number % len(self._buffers)][: bucket.nbytes]
            writer.fill(bucket, buffer)
            sums.append(checksum(buffer))
            travelling.append((transport.broadcast(buffer), bucket.nbytes))
        while travelling:
            arrived()
        writer.finish()
        return torch.stack(sums).tolist() if sums else []

    def _allocate(self, nbytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device.device()) for _ in range(2)]
