"""A trainer rank's end of a weight sync. Copies and messages of a pass are planned once, then repeated.

A rank's broadcasts wait for the receivers, which take the buckets of all ranks in one order (``bucket.py``). The order
of a whole sync is that of ``workers/weight_synchronizer.py``.
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
from skyrl_megatron.weight_sync.point_to_point import Exchange, ExchangingSender, ParcelSender
from skyrl_megatron.weight_sync.slices import Holdings, Parcels, Unroutable
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
    """Sends what ``source`` holds. Names, shapes, types and order must not change between syncs.

    The plan of a pass is made in the first sync, and its buckets are held until :meth:`close`.
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
        self._parcels: ParcelSender | None = None
        self._route: tuple[Parcels, dict[int, int], Exchange | None] | None = None
        self._addresses: list[int] = []

    def metadata(self) -> Sequence[TensorMeta]:
        """List what this rank will send, in order."""
        return self.source.metadata()

    def holdings(self) -> Holdings | str:
        """List what this rank holds, for a plan of routes, or why there can be none."""
        try:
            return Holdings.of(*self.source.held())
        except Unroutable as error:
            return str(error)

    def take_route(
        self, buckets: bytes, copies: bytes, ranks_of: dict[int, int], exchange: Exchange | None = None
    ) -> None:
        """Send these parcels (``Parcels.plain``) from now on. ``ranks_of``: worker → its number in this rank's group.
        ``exchange``: this rank's part, where ranks give one another what is for the workers on their GPUs."""
        self._route, self._parcels = (Parcels.of_plain(buckets, copies), ranks_of, exchange), None

    def listen(self, host: str) -> tuple[str, int]:
        """Take a free port of ``host``; return the address for the receivers."""
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def connect(self, host: str, port: int, receivers: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Open a group of this rank and wait for its receivers (worker ranks of all engines). Replaces an earlier one.

        No later wait of this group lasts longer than ``timeout_s`` either. Raises EngineGoneError.
        """
        self._open(GroupMember((host, port), 0, 1, receivers + 1), timeout_s)

    def join(self, member: GroupMember, timeout_s: float, sizes: Sequence[int] = ()) -> list[float]:
        """Join a group of ranks and engine workers that send point to point, and wait for all its members. Replaces an
        earlier one. Return the bytes per second in buckets of each of these ``sizes`` (``transport.measure``).

        No later wait of this group lasts longer than ``timeout_s`` either. Raises EngineGoneError.
        """
        transport = self._open(member, timeout_s)
        if not sizes:
            return []
        try:
            return measure(transport, member, sizes)
        except RuntimeError as error:
            self.close()
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
        self._transport = self._plan = self._parcels = self._route = None

    def send(self) -> list[Any]:
        """Send every bucket; return their checksums, in order, by routes (worker, checksum) each. The next bucket is
        filled while one travels.

        A rank that sends nothing to engines calls it too, without :meth:`connect`: others may need its shards.

        Raises WeightSyncError when no engine is connected, EngineGoneError when a receiver is gone or silent.
        The group is then closed: receivers get an error too, and it has to be made anew.
        """
        try:
            return self._send(self._transport) if self._route is None else self._send_parcels(self._transport)
        except BaseException:
            self.close()
            raise

    def _send(self, transport: Transport | None) -> list[int]:
        self.source.refresh()
        plan = self._current_plan()
        if transport is None and plan.buckets:
            raise WeightSyncError("send: no engine is connected: connect() comes first")
        total, self.sent_bytes = sum(bucket.nbytes for bucket in plan.buckets), 0
        sums: list[torch.Tensor] = []
        travelling: list[tuple[Callable[[], None], int]] = []

        def progress() -> str:
            return f"after {self.sent_bytes / 1e6:.1f} of {total / 1e6:.1f} MB"

        def arrived() -> None:
            wait, nbytes = travelling.pop(0)
            with _raising(EngineGoneError, "an engine worker is gone or silent", progress):
                wait()
            self.sent_bytes += nbytes

        with _raising(DistributedError, "a trainer rank with shards of the same weights is gone or silent", progress):
            try:
                for number, bucket in enumerate(plan.buckets):
                    if len(travelling) == 2:
                        arrived()
                    buffer = plan.fill(number)
                    sums.append(checksum(buffer))
                    assert transport is not None
                    with _raising(EngineGoneError, "an engine worker is gone", progress):
                        travelling.append((transport.broadcast(buffer), bucket.nbytes))
            except EngineGoneError:
                plan.finish()  # the ranks stay in step, and can send again
                raise
            plan.finish()
        while travelling:
            arrived()
        return torch.stack(sums).tolist() if sums else []

    def _send_parcels(self, transport: Transport | None) -> list[list[int]]:
        assert self._route is not None
        parcels, ranks_of, exchange = self._route
        self.source.refresh()
        addresses = self.source.addresses()
        if self._parcels is None or self._addresses != addresses:
            self._parcels = None  # its buckets are freed before there are new ones
            shards, in_place = self.source.held()[0], transport is not None and transport.sends_any_memory
            self._parcels = (
                ParcelSender(parcels, shards, ranks_of, device.device(), in_place=in_place)
                if exchange is None
                else ExchangingSender(exchange, parcels, shards, ranks_of, device.device())
            )
            self._addresses = addresses
        gone = "an engine worker" if exchange is None else "a trainer rank, or the engine worker on its GPU,"
        with _raising(EngineGoneError, f"{gone} is gone or silent", lambda: f"of {parcels.nbytes / 1e6:.1f} MB"):
            return self._parcels.send(transport, self.source.travels)

    def _current_plan(self) -> ExportPlan:
        """Return the plan made before, or a new one where the weights have moved."""
        if self._plan is None or self._plan.addresses != self.source.addresses():
            self._plan = None  # its buckets are freed before there are new ones
            self._plan = ExportPlan(self.source, self.bucket_bytes, device.device())
        return self._plan


@contextlib.contextmanager
def _raising(kind: type[SkyRLMegatronError], what: str, progress: Callable[[], str]) -> Iterator[None]:
    """Turn an error of torch.distributed into one of ours."""
    try:
        yield
    except RuntimeError as error:
        if device.is_out_of_memory(error):
            raise
        raise kind(f"send: {what} {progress()}: {first_line(error)}") from error
