"""Broadcast over gloo, in a group of its own that leaves the default process group alone."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch import Tensor


class GlooTransport:
    """One sender (rank 0) and its receivers. Creation waits for everybody, at most ``timeout_s``."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float = 120.0) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            host, port, world_size=None, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self._store), rank, world_size, timeout)

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's bytes into everybody's buffer."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([buffer], options).wait()
