"""How bytes get from trainer ranks to engine workers: NCCL, gloo, or memory that two processes share (CUDA IPC).

Where every worker gets its own part, all ranks that send and all workers are members of one group and send point to
point (:class:`GroupMember`). Where every worker gets everything, each rank that sends has a group, in which it is rank
0 and the workers of all engines are ranks 1 … n. The default process group of either side is left alone. The classes
in ``transport_<name>`` (``GlooTransport``, …) differ in how the group is made and how a buffer gets across.

The sender's few staging buffers are exported once each; afterwards a bucket costs one header, one copy on every worker
that gets it, and one acknowledgement. No weights go over the network, nor on GPUs through host memory.

On GPUs a worker reads the buffer where it is, so it must see the sender's GPU (``CUDA_VISIBLE_DEVICES`` of the whole
node). It maps the buffer into the context of its own GPU, over NVLink or PCIe: a context on each sender's GPU would
cost some 500 MB. On CPU a buffer moves into memory that has a descriptor and no name, which a worker opens through
``/proc``: it leaves nothing, whatever ends the two.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

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
        kind = OWN[name]
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


class GlooTransport(Transport):
    """Broadcast over TCP, bound to the interface that leads to the sender."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address(host))]
        options._timeout = self.timeout
        return gloo(store, rank, world_size, options)


class IpcTransport(Transport):
    """Buffers by handle; the group (over CPU) carries which buffer is ready, and who has read it."""

    sends_any_memory = False

    def __init__(self, host: str, port: int, rank: int, world_size: int, *rest: Any) -> None:
        self.rank = rank
        self._exported: dict[tuple[int, int], int] = {}  # place and size of a buffer → its number
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (rank, number) → that rank's buffer as seen from here
        super().__init__(host, port, rank, world_size, *rest)

    new_group = GlooTransport.new_group

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Copy rank 0's bytes from where they are. The kernels that filled ``buffer`` are waited for first."""
        header = self._told(buffer) if self.rank == 0 else _nothing_told()
        super().broadcast(header)()
        if self.rank != 0:
            self._read(header, buffer, 0)
        options = dist.BarrierOptions()
        options.timeout = self.timeout
        barrier = self.group.barrier(options)
        return lambda: barrier.wait(self.timeout) and None

    def send(self, buffer: Tensor, rank: int) -> Callable[[], None]:
        """Tell one member where its bytes lie; call what is returned to wait until it has read them."""
        header, read = self._told(buffer), _nothing_told()
        telling, reading = super().send(header, rank), self.group.recv([read], rank, 0)

        def wait() -> None:
            telling()
            reading.wait(self.timeout)
            assert torch.equal(read, header), (read, header)

        return wait

    def receive(self, buffer: Tensor, rank: int = 0) -> Callable[[], None]:
        """Call what is returned to wait until a member says where bytes for this one are, and copy them."""
        header = _nothing_told()
        announced = super().receive(header, rank)

        def wait() -> None:
            announced()
            self._read(header, buffer, rank)
            super(IpcTransport, self).send(header, rank)()

        return wait

    def _told(self, buffer: Tensor) -> Tensor:
        """Return what says where a buffer's bytes lie, once the kernels that fill it are done."""
        device.synchronize()
        return torch.tensor([self._export(buffer), buffer.numel()])

    def _read(self, header: Tensor, buffer: Tensor, rank: int) -> None:
        number, size = header.tolist()
        if (rank, number) not in self._mapped:
            self._mapped[rank, number] = self._open(rank, number)
        buffer.copy_(self._mapped[rank, number][:size])
        device.synchronize()

    def _export(self, buffer: Tensor) -> int:
        storage = buffer.untyped_storage()
        place = _place(storage) if device.has_cuda() else _shared_place(storage)
        if place not in self._exported:
            handle = _cuda_handle(storage) if device.has_cuda() else _cpu_handle(storage)
            number = self._exported[place] = len(self._exported)
            self._store.set(f"buffer{self.rank}.{number}", repr(handle))  # plain integers, booleans, text and bytes
        return self._exported[place]

    def _open(self, rank: int, number: int) -> Tensor:
        handle = ast.literal_eval(self._store.get(f"buffer{rank}.{number}").decode())
        storage = _open_cuda(*handle) if device.has_cuda() else _open_cpu(*handle)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def close(self) -> None:
        self._mapped.clear()
        super().close()


def _nothing_told() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _cuda_handle(storage: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the GPU that a storage is on, and what opens it in another process."""
    return str(torch.cuda.get_device_properties(storage.device).uuid), storage._share_cuda_()


def _open_cuda(where: str, handle: tuple[Any, ...]) -> torch.UntypedStorage:
    visible = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    if where not in visible:
        raise RuntimeError(f"GPU {where} of the sender is not visible here: set CUDA_VISIBLE_DEVICES to all of them")
    own, theirs = torch.cuda.current_device(), visible[where]
    through = own if own == theirs or torch.cuda.can_device_access_peer(own, theirs) else theirs
    # False: the sender has waited for its kernels, and its event belongs to another GPU's context
    return torch.UntypedStorage._new_shared_cuda(through, *handle[1:-1], False)


def _shared_place(storage: Any) -> tuple[int, int]:
    """Move a storage into shared memory unless it is there: its tensors follow it. An address may be used again for
    another buffer, a file's number is not."""
    descriptor, nbytes = storage._share_fd_cpu_()
    return os.fstat(descriptor).st_ino, nbytes


def _cpu_handle(storage: Any) -> tuple[str, int]:
    """Return the file that opens a storage which is in shared memory, and its bytes."""
    descriptor, nbytes = storage._share_fd_cpu_()
    return f"/proc/{os.getpid()}/fd/{descriptor}", nbytes


def _open_cpu(path: str, nbytes: int) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes))


WATCHDOG_FACTOR = 10
"""The group's own time-out over that of a wait. A wait that fails is an error of one sync, which the run survives."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEAN_UP_ONLY = "2"
"""What torch's watchdog does about a broken communicator: abort it (ProcessGroupNCCL.hpp, ``CleanUpOnly``); by
default it ends the process as well."""


class NcclTransport(Transport):
    """Broadcast on the current CUDA device. The communicator is made at once, not at the first bucket."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        from skyrl_megatron import device

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout * WATCHDOG_FACTOR
        options.is_high_priority_stream = True
        with _clean_up_only():
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        group.eager_connect_single_device(device.device())
        return group

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        super().close()


@contextlib.contextmanager
def _clean_up_only() -> Iterator[None]:
    """Let a group that is made within the block leave the process alive; it reads the variable when it is made."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


OWN: dict[str, type[Transport]] = {
    device.GLOO: GlooTransport,
    device.NCCL: NcclTransport,
    "ipc": IpcTransport,
}
"""The transports of this package, by name."""
