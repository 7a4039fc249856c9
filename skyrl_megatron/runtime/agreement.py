"""Agreement between ranks: one rank's error becomes the same error on every rank, so that none waits for one that
gave up; and the largest of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from skyrl_megatron import device


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on every rank when any rank has an ``error``; collective over all ranks.

    The message is that of the lowest rank with an error, preceded by its number unless all ranks have one. Without an
    error it costs one all-reduce of a flag.
    """
    failed = torch.tensor([float(error is not None)], device=device.device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return
    found: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _portable(error))
    errors = [(rank, each) for rank, each in enumerate(found) if each is not None]
    rank, first = errors[0]
    raise first if len(errors) == len(found) else type(first)(f"rank {rank}: {first}")


def group_maximum(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Return the largest of each value over the ranks of ``group``; collective."""
    largest = torch.tensor(values, device=device.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in largest]


def _portable(error: Exception | None) -> Exception | None:
    """Make an error that travels between processes: a ValueError if its constructor takes more than a message."""
    if error is None:
        return None
    try:
        return type(error)(str(error))
    except TypeError:
        return ValueError(f"{type(error).__name__}: {error}")


def from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
