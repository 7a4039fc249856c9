"""Weights over NCCL: CUDA tensors, between GPUs of one or several nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from skyrl_megatron.weight_sync.transport import Transport

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
