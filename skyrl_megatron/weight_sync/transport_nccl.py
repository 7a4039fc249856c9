"""Weights over NCCL: CUDA tensors, between GPUs of one or several nodes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from skyrl_megatron.weight_sync.transport import Transport


class NcclTransport(Transport):
    """Broadcast on the current CUDA device. The communicator is made at once, not at the first bucket."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        from skyrl_megatron import device

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        options.is_high_priority_stream = True
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        group.eager_connect_single_device(device.device())
        return group

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        super().close()
