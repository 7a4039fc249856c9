"""How bytes get from trainer ranks to the workers of engines: a group of their own, joined once, used often.

Where every worker gets its own part, all ranks that send and all workers are members of one group and send point to
point (:class:`GroupMember`). Where every worker gets everything, each rank that sends has a group, in which it is rank
0 and the workers of all engines are ranks 1 … n. The default process group of either side is left alone. The classes
in ``transport_<name>`` (``GlooTransport``, …) differ in how the group is made and how a buffer gets across.
"""

from __future__ import annotations

import datetime
import importlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from skyrl_megatron import device
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.plugins import TRANSPORTS

DEFAULT_TIMEOUT_S = 120.0
MEASURED_BUCKETS = 4
"""What is sent to measure a size of buckets, in buckets of the largest size."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group: its ``number`` of ``size``, of which the first ``senders`` are trainer ranks and the others
    engine workers."""

    address: tuple[str, int]
    """Where member 0 listens."""
    number: int
    senders: int
    size: int


def default_transport() -> str:
    """Choose NCCL where there is a GPU, else gloo."""
    return device.NCCL if device.has_cuda() else device.GLOO


def open_transport(
    name: str,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> Transport:
    """Open the transport called ``name``; wait until all ``world_size`` members are there, at most ``timeout_s``."""
    kind = TRANSPORTS.find(name)
    if kind is None:
        module = importlib.import_module(f"skyrl_megatron.weight_sync.transport_{name}")
        kind = getattr(module, f"{name.capitalize()}Transport")
    transport: Transport = kind(host, port, rank, world_size, timeout_s, listener)
    return transport


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket for rank 0 on ``host`` alone; port 0 takes a free one."""
    return socket.create_server((host, port))


class Transport(ABC):
    """One member of a group. Raises RuntimeError (torch) when a member dies or ``timeout_s`` pass."""

    sends_any_memory: ClassVar[bool] = True
    """Whether any memory can be sent; else a few buffers that stay where they are."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.timeout = datetime.timedelta(seconds=timeout_s)
        if rank == 0 and listener is None:
            listener = listen(host, port)
        self._store: Any = TCPStore(
            host,
            port if listener is None else listener.getsockname()[1],
            is_master=rank == 0,
            timeout=self.timeout,
            wait_for_workers=False,
            # torch takes the descriptor over
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self.group: Any = self.new_group(PrefixStore("weights", self._store), host, rank, world_size)

    @abstractmethod
    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        """Make the process group. Waits for its members."""

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Start sending rank 0's bytes into everybody's ``buffer``; call what is returned to wait for the end."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self.group.broadcast([buffer], options)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def send(self, buffer: Tensor, rank: int) -> Callable[[], None]:
        """Start sending ``buffer`` to one member; call what is returned to wait until it may be filled again."""
        work = self.group.send([buffer], rank, 0)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def receive(self, buffer: Tensor, rank: int = 0) -> Callable[[], None]:
        """Start receiving into ``buffer`` what a member sends to this one next; call what is returned to wait."""
        work = self.group.recv([buffer], rank, 0)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def close(self) -> None:
        """Leave the group. A member that waits for this one gets an error."""
        self.group = self._store = None


def measure(transport: Transport, member: GroupMember, sizes: Sequence[int]) -> list[float]:
    """Return the bytes per second that this rank sends in buckets of each of these sizes, while all ranks send, each
    to one worker; nothing on a worker. All members of a group call it together."""
    workers = member.size - member.senders
    sends = member.number < member.senders
    peers = [member.senders + member.number % workers]
    if not sends:
        peers = list(range(member.number - member.senders, member.senders, workers))
    rates: list[float] = []
    buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device.device()) for _ in range(2)]
    for size in sizes:
        count = MEASURED_BUCKETS * max(sizes) // size
        for peer in peers:
            began, travelling = 0.0, [_at_once, _at_once]
            for number in range(count + 1):
                if number == 1:  # the first one opens the connection
                    travelling[0]()
                    travelling[0] = _at_once
                    device.synchronize()
                    began = time.perf_counter()
                travelling[number % 2]()
                buffer = buffers[number % 2][:size]
                travelling[number % 2] = transport.send(buffer, peer) if sends else transport.receive(buffer, peer)
            for wait in travelling:
                wait()
            device.synchronize()
            if sends:
                rates.append(count * size / (time.perf_counter() - began))
    return rates


def _at_once() -> None:
    """Wait for nothing."""


def own_address(peer: str) -> str:
    """Return this machine's address on the way to ``peer``: the interface that a group binds to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, which appends a C++ stack."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def not_received(error: BaseException, sender: str, nbytes: int) -> WeightSyncError:
    """Return what a receiver raises when it failed after ``nbytes``: a lack of memory is no fault of the sender's."""
    if device.is_out_of_memory(error):
        return WeightSyncError(
            f"receive: no memory for weights that arrive, after {nbytes / 1e6:.1f} MB ({first_line(error)}); make "
            "generator.inference_engine.gpu_memory_utilization smaller"
        )
    return WeightSyncError(f"receive: {sender} is gone or silent after {nbytes / 1e6:.1f} MB: {first_line(error)}")
