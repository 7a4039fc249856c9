"""Transports from trainer ranks to engine workers: NCCL, gloo, or memory that two processes share (CUDA IPC).

With a reshard plan, all sending ranks and all workers are members of one group and send point to point
(:class:`GroupMember`). Without one, each sending rank has a group in which it is rank 0 and the workers of all engines
are ranks 1 … n. The default process groups are not used. The subclasses of :class:`Transport` differ in how they make
the group and transfer a buffer.

:class:`IpcTransport` exports each of the sender's few staging buffers once. Then a bucket costs one header, one copy
on every worker that receives it, and one acknowledgement. Weights do not cross the network, and on GPUs not host
memory either.

On GPUs a worker reads the sender's buffer, so it must see the sender's GPU (``CUDA_VISIBLE_DEVICES`` of the whole
node). It maps the buffer into the context of its own GPU, over NVLink or PCIe, because a context on each sender's GPU
would take some 500 MB. On CPU a buffer moves into shared memory that has a file descriptor but no name. A worker opens
it through ``/proc``, so nothing is left when the processes end.
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
"""Data sent to measure one bucket size, in buckets of the largest size."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a point-to-point group of ``size`` members. The first ``senders`` are trainer ranks, the others
    engine workers."""

    address: tuple[str, int]
    """Host and port at which member 0 listens."""
    number: int
    senders: int
    size: int


def default_transport() -> str:
    """Return NCCL if there is a GPU, else gloo."""
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
    """Open the transport ``name`` and wait for all ``world_size`` members, at most ``timeout_s``."""
    kind = TRANSPORTS.find(name)
    if kind is None:
        kind = BUILT_IN_TRANSPORTS[name]
    transport: Transport = kind(host, port, rank, world_size, timeout_s, listener)
    return transport


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket for rank 0 on ``host`` only; port 0 chooses a free port."""
    return socket.create_server((host, port))


class Transport(ABC):
    """One member of a group. Raises RuntimeError (torch) if a member dies or ``timeout_s`` pass."""

    sends_any_memory: ClassVar[bool] = True
    """Whether any memory can be sent; if False, only a few buffers that are not reallocated."""

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
            # new_group waits for the members; the store would wait for a number of clients
            wait_for_workers=False,
            # torch takes ownership of the descriptor
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self.group: Any = self.new_group(PrefixStore("weights", self._store), host, rank, world_size)

    @abstractmethod
    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        """Make the process group, and wait for its members."""

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Start to broadcast rank 0's ``buffer``, [bytes] uint8 on every rank. Return a function that waits for the
        end."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        # the group's own method: functions of torch.distributed need a registered group, and so a default group
        work = self.group.broadcast([buffer], options)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def send(self, buffer: Tensor, rank: int) -> Callable[[], None]:
        """Start to send ``buffer``, [bytes] uint8, to one member. Return a function that waits until it may be filled
        again."""
        work = self.group.send([buffer], rank, 0)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def receive(self, buffer: Tensor, rank: int = 0) -> Callable[[], None]:
        """Start to receive the next buffer that ``rank`` sends to this member, into ``buffer`` [bytes] uint8. Return a
        function that waits."""
        work = self.group.recv([buffer], rank, 0)

        def wait() -> None:
            work.wait(self.timeout)

        return wait

    def close(self) -> None:
        """Leave the group. Members that wait for this one get an error."""
        self.group = self._store = None


def measure(transport: Transport, member: GroupMember, sizes: Sequence[int]) -> list[float]:
    """Return the bytes per second at which this rank sends buckets of each of these sizes, while all ranks send, each
    to one worker; an empty list on a worker. Collective over the group."""
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
            began, in_flight = 0.0, [_no_wait, _no_wait]
            for number in range(count + 1):
                if number == 1:  # the first one opens the connection
                    in_flight[0]()
                    in_flight[0] = _no_wait
                    device.synchronize()
                    began = time.perf_counter()
                in_flight[number % 2]()
                buffer = buffers[number % 2][:size]
                in_flight[number % 2] = transport.send(buffer, peer) if sends else transport.receive(buffer, peer)
            for wait in in_flight:
                wait()
            device.synchronize()
            if sends:
                rates.append(count * size / (time.perf_counter() - began))
    return rates


def _no_wait() -> None:
    """Wait for nothing."""


def own_address(peer: str) -> str:
    """Return the address of this machine's interface to ``peer``, which a group binds to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # connect() of a UDP socket sends nothing, it only chooses a route; the port does not matter
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """Return the first line of an error message of torch, which appends a C++ stack."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def not_received(error: BaseException, sender: str, nbytes: int) -> WeightSyncError:
    """Return the error of a receiver that failed after ``nbytes``. A lack of memory is not the sender's fault."""
    if device.is_out_of_memory(error):
        return WeightSyncError(
            f"receive: out of memory for incoming weights after {nbytes / 1e6:.1f} MB ({first_line(error)}); lower "
            "generator.inference_engine.gpu_memory_utilization"
        )
    return WeightSyncError(f"receive: {sender} is gone or silent after {nbytes / 1e6:.1f} MB: {first_line(error)}")


class GlooTransport(Transport):
    """Broadcast over TCP, bound to the interface that leads to the sender."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        # made directly: dist.new_group would need a default group that has all members
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address(host))]
        options._timeout = self.timeout
        return gloo(store, rank, world_size, options)


class IpcTransport(Transport):
    """Sends buffers by IPC handle. The group (gloo) carries which buffer is ready and who has read it."""

    sends_any_memory = False

    def __init__(self, host: str, port: int, rank: int, world_size: int, *rest: Any) -> None:
        self.rank = rank
        self._exported: dict[tuple[int, int], int] = {}  # address and size of a buffer → its number
        self._mapped: dict[tuple[int, int], Tensor] = {}  # (rank, number) → that rank's buffer, mapped here
        super().__init__(host, port, rank, world_size, *rest)

    new_group = GlooTransport.new_group

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Copy rank 0's buffer from its memory into ``buffer``, [bytes] uint8, after the kernels that fill it are
        done."""
        header = self._header(buffer) if self.rank == 0 else _empty_header()
        super().broadcast(header)()
        if self.rank != 0:
            self._read(header, buffer, 0)
        options = dist.BarrierOptions()
        # readers join the barrier once they have read: then the sender may fill the buffer again
        options.timeout = self.timeout
        barrier = self.group.barrier(options)
        return lambda: barrier.wait(self.timeout) and None

    def send(self, buffer: Tensor, rank: int) -> Callable[[], None]:
        """Announce ``buffer``, [bytes] uint8, to one member. Return a function that waits until it has read it."""
        header, read = self._header(buffer), _empty_header()
        sending, reading = super().send(header, rank), self.group.recv([read], rank, 0)

        def wait() -> None:
            sending()
            reading.wait(self.timeout)
            assert torch.equal(read, header), (read, header)

        return wait

    def receive(self, buffer: Tensor, rank: int = 0) -> Callable[[], None]:
        """Return a function that waits until a member announces a buffer for this one, and copies it to ``buffer``,
        [bytes] uint8."""
        header = _empty_header()
        announced = super().receive(header, rank)

        def wait() -> None:
            announced()
            self._read(header, buffer, rank)
            super(IpcTransport, self).send(header, rank)()

        return wait

    def _header(self, buffer: Tensor) -> Tensor:
        """Return the header (number, bytes) of a buffer, after the kernels that fill it are done."""
        device.synchronize()
        # another process cannot wait for this one's stream, so the kernels must be done before it gets the
        # buffer
        return torch.tensor([self._export(buffer), buffer.numel()])

    def _read(self, header: Tensor, buffer: Tensor, rank: int) -> None:
        number, size = header.tolist()
        if (rank, number) not in self._mapped:
            self._mapped[rank, number] = self._open(rank, number)
        buffer.copy_(self._mapped[rank, number][:size])
        # the bytes are out of the buffer before it is acknowledged: the sender overwrites it next
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
        # literal_eval, not pickle: nothing that comes over a socket is executed
        handle = ast.literal_eval(self._store.get(f"buffer{rank}.{number}").decode())
        storage = _open_cuda(*handle) if device.has_cuda() else _open_cpu(*handle)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def close(self) -> None:
        self._mapped.clear()
        super().close()


def _empty_header() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _cuda_handle(storage: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the UUID of a storage's GPU, and the handle that opens the storage in another process."""
    return str(torch.cuda.get_device_properties(storage.device).uuid), storage._share_cuda_()


def _open_cuda(where: str, handle: tuple[Any, ...]) -> torch.UntypedStorage:
    visible = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    if where not in visible:
        raise RuntimeError(f"the sender's GPU {where} is not visible here: set CUDA_VISIBLE_DEVICES to all GPUs")
    own, theirs = torch.cuda.current_device(), visible[where]
    through = own if own == theirs or torch.cuda.can_device_access_peer(own, theirs) else theirs
    # False: do not wait for the sender's event. The sender has synchronized, and its event has another GPU's context
    return torch.UntypedStorage._new_shared_cuda(through, *handle[1:-1], False)


def _shared_place(storage: Any) -> tuple[int, int]:
    """Move a storage into shared memory unless it is there, and return (inode, bytes). Its tensors follow it. Unlike
    an address, an inode is not reused for another buffer."""
    descriptor, nbytes = storage._share_fd_cpu_()
    return os.fstat(descriptor).st_ino, nbytes


def _cpu_handle(storage: Any) -> tuple[str, int]:
    """Return the file that opens a storage in shared memory, and its bytes."""
    descriptor, nbytes = storage._share_fd_cpu_()
    return f"/proc/{os.getpid()}/fd/{descriptor}", nbytes


def _open_cpu(path: str, nbytes: int) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes))


WATCHDOG_FACTOR = 10
"""The group's timeout as a multiple of a wait's timeout. A wait that fails is an error of one sync, and the run
continues."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEAN_UP_ONLY = "2"
"""Lets torch's watchdog abort a broken communicator (ProcessGroupNCCL.hpp, ``CleanUpOnly``). By default it also ends
the process."""


class NcclTransport(Transport):
    """NCCL on the current CUDA device. The communicator is made eagerly, not at the first bucket."""

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
            # abort, because an orderly end would wait for operations that a dead member never joins
            self.group.abort()
        super().close()


@contextlib.contextmanager
def _clean_up_only() -> Iterator[None]:
    """Set the variable that keeps the process alive if a group made within the block fails."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


BUILT_IN_TRANSPORTS: dict[str, type[Transport]] = {
    device.GLOO: GlooTransport,
    device.NCCL: NcclTransport,
    "ipc": IpcTransport,
}
"""The built-in transports, by name."""
