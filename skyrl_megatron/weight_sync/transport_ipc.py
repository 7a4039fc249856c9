"""Weights between processes of one node that map the same memory: CUDA IPC on GPUs, shared memory on CPU.

The sender's few staging buffers are exported once each; afterwards a bucket costs one header, one copy on every worker
that gets it, and one acknowledgement. No weights go over the network, nor on GPUs through host memory.

On GPUs a worker reads the buffer where it is, so it must see the sender's GPU (``CUDA_VISIBLE_DEVICES`` of the whole
node). It maps the buffer into the context of its own GPU, over NVLink or PCIe: a context on each sender's GPU would
cost some 500 MB. On CPU a buffer moves into memory that has a descriptor and no name, which a worker opens through
``/proc``: it leaves nothing, whatever ends the two.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.weight_sync.transport import Transport
from skyrl_megatron.weight_sync.transport_gloo import GlooTransport


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
