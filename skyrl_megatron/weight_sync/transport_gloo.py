"""Weights over gloo: CPU tensors, any network."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from skyrl_megatron.weight_sync import transport
from skyrl_megatron.weight_sync.transport import own_address


class Transport(transport.Transport):
    """Broadcast over TCP, bound to the interface that leads to the sender."""

    def new_group(self, store: Store, host: str, rank: int, world_size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host))]
        options._timeout = self.timeout
        return dist.ProcessGroupGloo(store, rank, world_size, options)
