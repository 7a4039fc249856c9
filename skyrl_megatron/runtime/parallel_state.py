"""Process groups of a layout, errors that all ranks raise together, and the time a rank spends without waiting.

Wall time does not show which rank is slow, because in every collective each rank waits for the slowest. On CPU every
wait of ``torch.distributed`` goes through ``Work.wait`` (``torch/distributed/distributed_c10d.py``), which returns at
the end of the collective, so this time can be subtracted. On GPUs it returns at once and the stream waits, so there is
no such measurement.

This is the only file that calls ``megatron.core.parallel_state``. Megatron's modules get the same groups as a
``ProcessGroupCollection``.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from skyrl_megatron import device
from skyrl_megatron.config.layout import ParallelConfig, layout_problems
from skyrl_megatron.errors import ConfigError, DistributedError
from skyrl_megatron.runtime import cpu_patches as megatron_patches

_waited = 0.0
_counting = False


def start_wait_timer() -> None:
    """Start to measure the time in ``Work.wait``. Further calls have no effect."""
    global _counting
    if _counting:
        return
    _counting = True
    from torch._C._distributed_c10d import Work

    # replaced on the class: groups of Megatron and of torch make their own Work objects
    wait: Callable[..., Any] = Work.wait

    def counted(self: Work, *args: Any, **kwargs: Any) -> Any:
        global _waited
        began = time.perf_counter()
        try:
            return wait(self, *args, **kwargs)
        finally:
            _waited += time.perf_counter() - began

    Work.wait = counted  # type: ignore[method-assign]


def own_seconds() -> float:
    """Return a clock in seconds that stops while this process waits in a collective. Use differences only."""
    return time.perf_counter() - _waited


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on every rank if any rank has an ``error``; collective over all ranks.

    The message is that of the lowest rank with an error, with the rank as prefix unless all ranks have an error.
    Without an error this costs one all-reduce of a flag.
    """
    # a flag first: gathering objects costs a pickle and a size exchange in every call
    failed = torch.tensor([float(error is not None)], device=device.device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return
    gathered: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, _portable(error))
    errors = [(rank, failure) for rank, failure in enumerate(gathered) if failure is not None]
    rank, first = errors[0]
    # all ranks failed alike, so no rank's number says more
    raise first if len(errors) == len(gathered) else type(first)(f"rank {rank}: {first}")


def group_maximum(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Return the largest of each value over the ranks of ``group``; collective."""
    largest = torch.tensor(values, device=device.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in largest]


def _portable(error: Exception | None) -> Exception | None:
    """Return an error that can be pickled: a ValueError if the constructor takes more than a message."""
    if error is None:
        return None
    # some errors take other arguments than a message
    try:
        return type(error)(str(error))
    except TypeError:
        return ValueError(f"{type(error).__name__}: {error}")


def from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank."""
    objects = [value]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The groups that this rank belongs to. ``group.size()`` and ``group.rank()`` give degree and position."""

    parallel: ParallelConfig
    tp: dist.ProcessGroup
    """Ranks that share each weight matrix of attention and dense layers."""
    pp: dist.ProcessGroup
    """Pipeline stages."""
    cp: dist.ProcessGroup
    """Ranks that share each sequence."""
    dp: dist.ProcessGroup
    """Replicas, cp excluded."""
    dp_cp: dist.ProcessGroup
    """Ranks over which gradients of dense parameters are summed."""
    tp_cp: dist.ProcessGroup
    """Ranks that hold shards of the same micro-batch."""
    mp: dist.ProcessGroup
    """tp·pp: ranks that hold the shards of one replica of the dense parameters."""
    ep: dist.ProcessGroup
    """Ranks over which the experts of a layer are distributed."""
    etp: dist.ProcessGroup
    """Ranks that share each expert's matrices."""
    edp: dist.ProcessGroup
    """Ranks over which gradients of experts are summed."""
    embd: dist.ProcessGroup | None
    """First and last pipeline stage, which share tied embeddings; None on stages between them."""
    collection: ProcessGroupCollection
    """The same groups for Megatron's modules."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def is_collection_rank(self) -> bool:
        """Whether this is the one rank of its replica whose results are collected: last stage, tp 0, cp 0."""
        return self.is_last_stage and self.is_first_of_stage

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank answers for its pipeline stage of a replica: tp 0, cp 0."""
        return self.tp.rank() == 0 and self.cp.rank() == 0


def initialize(parallel: ParallelConfig, *, timeout_s: float = 600.0, seed: int = 1234) -> ProcessGroups:
    """Create all groups of a layout and seed all random states. Every rank calls it.

    ``torch.distributed`` must be initialised. ``timeout_s`` limits every collective. Without CUDA, Megatron is patched
    to run on the CPU. Before any group is created, raises ConfigError for an impossible layout, and DistributedError
    if the number of processes is not ``parallel.world_size``.
    """
    problems = layout_problems(parallel)
    if problems:
        raise ConfigError(problems)
    # before a group is created: Megatron's own assertion would name no setting
    if dist.get_world_size() != parallel.world_size:
        raise DistributedError(
            f"the layout needs {parallel.world_size} ranks, but {dist.get_world_size()} processes were started: start "
            "as many, or change the parallel degrees"
        )
    # before the seeding below, which calls CUDA
    megatron_patches.install()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=timeout_s / 60,
        # gloo groups in addition to NCCL's would double connections; only Megatron's own checkpoints use them
        create_gloo_process_groups=False,
    )
    # the tracker may exist from an earlier engine of this process, with states of its own
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return ProcessGroups(
        parallel=parallel,
        tp=groups.tp,
        pp=groups.pp,
        cp=groups.cp,
        dp=groups.dp,
        dp_cp=groups.dp_cp,
        tp_cp=groups.tp_cp,
        mp=groups.mp,
        ep=groups.ep,
        etp=groups.expt_tp,
        edp=groups.expt_dp,
        embd=groups.embd,
        collection=groups,
    )


def end_groups(*, world: bool = False) -> None:
    """Destroy the groups of a layout, and with ``world`` the default group too.

    It does not wait for other ranks; ranks that wait for this one get an error. Models that use the groups must not be
    referenced any more. Megatron's own function only drops its references, so threads and connections would stay.
    """
    # Megatron's references first, or destroyed groups would still be found through it
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    _drop_graphs()
    # models refer to groups in cycles, which only the collector frees
    gc.collect()
    if world and dist.is_initialized():
        dist.destroy_process_group()


def _drop_graphs() -> None:
    """Detach tensors that are still alive from their autograd graphs.

    Megatron's token dispatchers keep probabilities of the last micro-batch. Their graph references the gradient hooks
    of the dispatcher's own model, in a cycle that the garbage collector cannot see. The model would never be freed and
    would keep its process groups, whose threads wake every 10 ms.
    """
    for found in gc.get_objects():
        if type(found) is torch.Tensor and not found._is_view() and found.grad_fn is not None:
            found.detach_()
