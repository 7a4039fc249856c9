"""Megatron's forward-backward schedules of micro-batches, with and without pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from skyrl_megatron.runtime.parallel_state import ProcessGroups

type ForwardStepFunc[M] = Callable[[Iterator[M], "torch.nn.Module"], tuple["Tensor", Callable[["Tensor"], Any]]]


def run_schedule[M](
    forward_step: ForwardStepFunc[M],
    micro_batches: Sequence[M],
    chunks: Sequence[torch.nn.Module],
    groups: ProcessGroups,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run all micro-batches; return the loss closures' results, one a micro-batch, on the last stage, else ``[]``.

    Every stage gets every micro-batch; with virtual pipelining each model chunk reads them from its own iterator.
    Sequence lengths vary, so stages send shapes ahead of tensors (``variable_seq_lengths``).
    """
    schedule = get_forward_backward_func(groups.parallel.pp, groups.parallel.vpp if len(chunks) > 1 else None)
    iterators = [iter(micro_batches) for _ in chunks]
    results: list[Any] = schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # both unused with variable sequence lengths
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def share_from_last_stage[V](value: V, group: dist.ProcessGroup) -> V:
    """Return the last pipeline stage's ``value`` on every stage. For small objects, such as metrics."""
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return box[0]
