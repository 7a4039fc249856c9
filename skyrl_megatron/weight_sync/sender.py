"""A trainer rank's side of a weight sync. Copies and messages of a pass are planned once, then repeated.

A rank's broadcasts wait for the receivers, which take the buckets of all ranks in one order (``buckets.py``).
``workers/weight_synchronizer.py`` drives a whole sync.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from skyrl_megatron import device
from skyrl_megatron.errors import DistributedError, EngineGoneError, SkyRLMegatronError, WeightSyncError
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
from skyrl_megatron.weight_sync.buckets import TensorMeta, checksum
from skyrl_megatron.weight_sync.export_plan import ExportPlan
from skyrl_megatron.weight_sync.point_to_point import ExchangeSchedule, ExchangeSender, SliceSender
from skyrl_megatron.weight_sync.slices import ReshardUnsupported, SourceMap, TransferList
from skyrl_megatron.weight_sync.tensors import WeightSource
from skyrl_megatron.weight_sync.transport import (
    DEFAULT_TIMEOUT_S,
    GroupMember,
    Transport,
    default_transport,
    first_line,
    listen,
    measure,
    open_transport,
)


class WeightSender:
    """Sends the weights of ``source``. Names, shapes, dtypes and order must not change between syncs.

    The first sync plans the pass. Its buckets are held until :meth:`close`.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        transport: str | None = None,
    ) -> None:
        self.source = source
        self.bucket_bytes = bucket_bytes
        self.transport_name = transport or default_transport()
        self.sent_bytes = 0
        """Bytes of the sync in progress, or of the last one."""
        self._listener: socket.socket | None = None
        self._transport: Transport | None = None
        self._plan: ExportPlan | None = None
        self._slice_sender: SliceSender | None = None
        self._transfers: tuple[TransferList, dict[int, int], ExchangeSchedule | None] | None = None
        self._addresses: list[int] = []

    def metadata(self) -> Sequence[TensorMeta]:
        """List what this rank will send, in order."""
        return self.source.metadata()

    def source_map(self) -> SourceMap | str:
        """Return the slices that this rank holds, for a reshard plan, or why there can be no plan."""
        try:
            return SourceMap.of(*self.source.local_shards())
        except ReshardUnsupported as error:
            return str(error)

    def set_transfers(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: ExchangeSchedule | None = None
    ) -> None:
        """Use this send list (``TransferList.wire``) from now on.

        ``ranks_of``: worker → its number in this rank's group. ``exchange``: this rank's schedule, if ranks exchange
        buckets for the workers on their GPUs.
        """
        self._transfers, self._slice_sender = (TransferList.from_wire(buckets, copies), ranks_of, exchange), None

    def listen(self, host: str) -> tuple[str, int]:
        """Listen on a free port of ``host``; return the address for the receivers."""
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def connect(self, host: str, port: int, receivers: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Open a group of this rank and wait for its receivers (the workers of all engines). Replaces an earlier
        group.

        ``timeout_s`` also limits every later wait of the group. Raises EngineGoneError.
        """
        self._open(GroupMember((host, port), 0, 1, receivers + 1), timeout_s)

    def join(self, member: GroupMember, timeout_s: float, sizes: Sequence[int] = ()) -> list[float]:
        """Join a point-to-point group of ranks and engine workers, and wait for all its members. Replaces an earlier
        group. Return the bytes per second in buckets of each of these ``sizes`` (``transport.measure``).

        ``timeout_s`` also limits every later wait of the group. Raises EngineGoneError.
        """
        transport = self._open(member, timeout_s)
        if not sizes:
            return []
        try:
            return measure(transport, member, sizes)
        except RuntimeError as error:
            self.close()
            # a lack of memory is not a member's fault: the caller reports it as such
            if device.is_out_of_memory(error):
                raise
            raise EngineGoneError(f"connect: a member is gone or silent: {first_line(error)}") from error

    def _open(self, member: GroupMember, timeout_s: float) -> Transport:
        self.close()
        name = self.transport_name
        listener, self._listener = self._listener, None
        if member.number and listener is not None:
            listener.close()  # the group's first member listens
            listener = None
        try:
            transport = open_transport(name, *member.address, member.number, member.size, timeout_s, listener)
        except (RuntimeError, OSError) as error:
            host, port = member.address
            who = f"{member.size - member.senders} engine workers"
            if member.senders > 1:
                who = f"{member.senders} trainer ranks and {who}"
            raise EngineGoneError(
                f"connect: not all of {who} reached {host}:{port} within {timeout_s:.0f} s: {first_line(error)}"
            ) from error
        self._transport = transport
        return transport

    def close(self) -> None:
        """Leave the group and free the buckets."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._plan = self._slice_sender = self._transfers = None

    def send(self) -> list[Any]:
        """Send every bucket; return their checksums in order, with a reshard plan as (worker, checksum). The next
        bucket is filled while one is in flight.

        A rank that sends nothing to engines also calls it, without :meth:`connect`: others may need its shards.

        Raises WeightSyncError if no engine is connected, EngineGoneError if a receiver is gone or silent. The group is
        then closed: receivers get an error too, and a new group is needed.
        """
        try:
            return self._send(self._transport) if self._transfers is None else self._send_slices(self._transport)
        except BaseException:
            # also for KeyboardInterrupt: receivers wait until the group is gone
            self.close()
            raise

    def _send(self, transport: Transport | None) -> list[int]:
        # collective for some sources: a rank that sends nothing calls it too
        self.source.refresh()
        plan = self._current_plan()
        if transport is None and plan.buckets:
            raise WeightSyncError("send: no engine is connected; call connect() first")
        total, self.sent_bytes = sum(bucket.nbytes for bucket in plan.buckets), 0
        sums: list[torch.Tensor] = []
        in_flight: list[tuple[Callable[[], None], int]] = []

        def progress() -> str:
            return f"after {self.sent_bytes / 1e6:.1f} of {total / 1e6:.1f} MB"

        def arrived() -> None:
            wait, nbytes = in_flight.pop(0)
            with _raising(EngineGoneError, "an engine worker is gone or silent", progress):
                wait()
            self.sent_bytes += nbytes

        with _raising(DistributedError, "a trainer rank with shards of the same weights is gone or silent", progress):
            try:
                for number, bucket in enumerate(plan.buckets):
                    # the plan has two buffers, so the third bucket overwrites the first
                    if len(in_flight) == 2:
                        arrived()
                    buffer = plan.fill(number)
                    sums.append(checksum(buffer))
                    assert transport is not None
                    with _raising(EngineGoneError, "an engine worker is gone", progress):
                        in_flight.append((transport.broadcast(buffer), bucket.nbytes))
            except EngineGoneError:
                plan.finish()  # the ranks stay in sync, and can send again
                raise
            plan.finish()
        while in_flight:
            arrived()
        # one read for all sums, because reading one waits for the device
        return torch.stack(sums).tolist() if sums else []

    def _send_slices(self, transport: Transport | None) -> list[list[int]]:
        assert self._transfers is not None
        transfers, ranks_of, exchange = self._transfers
        self.source.refresh()
        addresses = self.source.addresses()
        if self._slice_sender is None or self._addresses != addresses:
            self._slice_sender = None  # its buckets are freed before there are new ones
            shards, in_place = self.source.local_shards()[0], transport is not None and transport.sends_any_memory
            self._slice_sender = (
                SliceSender(transfers, shards, ranks_of, device.device(), in_place=in_place)
                if exchange is None
                else ExchangeSender(exchange, transfers, shards, ranks_of, device.device())
            )
            self._addresses = addresses
        gone = "an engine worker" if exchange is None else "a trainer rank, or the engine worker on its GPU,"
        with _raising(
            EngineGoneError, f"{gone} is gone or silent", lambda: f"while sending {transfers.nbytes / 1e6:.1f} MB"
        ):
            return self._slice_sender.send(transport, self.source.sends_adapter)

    def _current_plan(self) -> ExportPlan:
        """Return the existing plan, or a new one if the weights have moved."""
        if self._plan is None or self._plan.addresses != self.source.addresses():
            self._plan = None  # its buckets are freed before there are new ones
            self._plan = ExportPlan(self.source, self.bucket_bytes, device.device())
        return self._plan


@contextlib.contextmanager
def _raising(kind: type[SkyRLMegatronError], what: str, progress: Callable[[], str]) -> Iterator[None]:
    """Convert an error of torch.distributed to ``kind``."""
    try:
        yield
    except RuntimeError as error:
        if device.is_out_of_memory(error):
            raise
        raise kind(f"send: {what} {progress()}: {first_line(error)}") from error
