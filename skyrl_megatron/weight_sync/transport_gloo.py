"""Weights over gloo: CPU tensors, any network."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from skyrl_megatron.weight_sync.transport import Transport, own_address


class GlooTransport(Transport):
    """Broadcast over TCP, bound to the interface that leads to the sender."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address(host))]
        options._timeout = self.timeout
        return gloo(store, rank, world_size, options)
