"""Weights over CUDA IPC: trainer ranks and workers on the GPUs of one node, sharing them or beside one another.

The sender's few staging buffers are exported once each; afterwards a bucket costs one header, one device-to-device
copy on every worker, and one acknowledgement. Nothing goes through host memory or the network. A worker reads the
buffer where it lies, so it must see the sender's GPU (``CUDA_VISIBLE_DEVICES`` of the whole node). It maps the buffer
into the context of its own GPU, over NVLink or PCIe: a context on each sender's GPU would cost some 500 MB each.
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

    def __init__(self, host: str, port: int, rank: int, world_size: int, *rest: Any) -> None:
        self.rank = rank
        self._exported: dict[int, int] = {}  # address of a buffer → its number
        self._mapped: dict[int, Tensor] = {}  # number → the sender's buffer as seen from here
        super().__init__(host, port, rank, world_size, *rest)

    new_group = GlooTransport.new_group

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Copy rank 0's bytes where they lie. The kernels that filled ``buffer`` are waited for first."""
        header = torch.zeros(2, dtype=torch.int64)
        if self.rank == 0:
            torch.cuda.synchronize()
            header[0], header[1] = self._export(buffer), buffer.numel()
        super().broadcast(header)()
        if self.rank != 0:
            number, size = header.tolist()
            if number not in self._mapped:
                self._mapped[number] = self._open(number)
            buffer.copy_(self._mapped[number][:size])
            torch.cuda.synchronize()
        options = dist.BarrierOptions()
        options.timeout = self.timeout
        barrier = self.group.barrier(options)
        return lambda: barrier.wait(self.timeout) and None

    def _export(self, buffer: Tensor) -> int:
        storage: Any = buffer.untyped_storage()
        if storage.data_ptr() not in self._exported:
            number = len(self._exported)
            where = torch.cuda.get_device_properties(buffer.device).uuid
            # plain integers, booleans and bytes
            self._store.set(f"buffer{number}", repr((str(where), storage._share_cuda_())))
            self._exported[storage.data_ptr()] = number
        return self._exported[storage.data_ptr()]

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
