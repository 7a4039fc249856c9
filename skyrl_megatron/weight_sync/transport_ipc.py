"""Weights over CUDA IPC: trainer ranks and workers on the GPUs of one node, sharing them or beside one another.

The sender's few staging buffers are exported once each; afterwards a bucket costs one header, one device-to-device
copy on every worker that gets it, and one acknowledgement. Nothing goes through host memory or the network. A worker
reads the buffer where it lies, so it must see the sender's GPU (``CUDA_VISIBLE_DEVICES`` of the whole node). It maps
the buffer into the context of its own GPU, over NVLink or PCIe: a context on each sender's GPU would cost some 500 MB.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.weight_sync.transport import Transport
from skyrl_megatron.weight_sync.transport_gloo import GlooTransport


class IpcTransport(Transport):
    """Buffers by handle; the group (over CPU) carries which buffer is ready, and who has read it."""

    sends_any_memory = False

    def __init__(self, host: str, port: int, rank: int, world_size: int, *rest: Any) -> None:
        self.rank = rank
        self._exported: dict[tuple[int, int], int] = {}  # address and size of a buffer → its number
        self._mapped: dict[int, Tensor] = {}  # number → the sender's buffer as seen from here
        super().__init__(host, port, rank, world_size, *rest)

    new_group = GlooTransport.new_group

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Copy rank 0's bytes where they lie. The kernels that filled ``buffer`` are waited for first."""
        header = self._told(buffer) if self.rank == 0 else _nothing_told()
        super().broadcast(header)()
        if self.rank != 0:
            self._read(header, buffer)
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

    def receive(self, buffer: Tensor) -> Callable[[], None]:
        """Call what is returned to wait until rank 0 tells where bytes for this member lie, and copy them."""
        header = _nothing_told()
        told = super().receive(header)

        def wait() -> None:
            told()
            self._read(header, buffer)
            super(IpcTransport, self).send(header, 0)()

        return wait

    def _told(self, buffer: Tensor) -> Tensor:
        """Return what says where a buffer's bytes lie, once the kernels that fill it are done."""
        torch.cuda.synchronize()
        return torch.tensor([self._export(buffer), buffer.numel()])

    def _read(self, header: Tensor, buffer: Tensor) -> None:
        number, size = header.tolist()
        if number not in self._mapped:
            self._mapped[number] = self._open(number)
        buffer.copy_(self._mapped[number][:size])
        torch.cuda.synchronize()

    def _export(self, buffer: Tensor) -> int:
        storage: Any = buffer.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        if place not in self._exported:
            number = len(self._exported)
            where = torch.cuda.get_device_properties(buffer.device).uuid
            # plain integers, booleans and bytes
            self._store.set(f"buffer{number}", repr((str(where), storage._share_cuda_())))
            self._exported[place] = number
        return self._exported[place]

    def _open(self, number: int) -> Tensor:
        where, handle = ast.literal_eval(self._store.get(f"buffer{number}").decode())
        visible = {
            str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())
        }
        if where not in visible:
            raise RuntimeError(
                f"GPU {where} of the sender is not visible here: set CUDA_VISIBLE_DEVICES to all of them"
            )
        own, theirs = torch.cuda.current_device(), visible[where]
        through = own if own == theirs or torch.cuda.can_device_access_peer(own, theirs) else theirs
        # False: the sender has waited for its kernels, and its event belongs to another GPU's context
        storage = torch.UntypedStorage._new_shared_cuda(through, *handle[1:-1], False)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def close(self) -> None:
        self._mapped.clear()
        super().close()


def _nothing_told() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)
