"""Failing together: one rank's problem becomes the same error on every rank, and none waits for one that gave up."""

from __future__ import annotations

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


def _portable(error: Exception | None) -> Exception | None:
    """An error that travels between processes: types whose constructor takes more than a message become ValueError."""
    if error is None:
        return None
    try:
        return type(error)(str(error))
    except TypeError:
        return ValueError(f"{type(error).__name__}: {error}")
