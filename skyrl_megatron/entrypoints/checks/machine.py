"""The machine that the run will get: what shows only there, and what its processes may lock."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron import device
from skyrl_megatron.config.hardware import UNLOCK
from skyrl_megatron.config.rules.role_layout import active_roles
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem

LEAST_LOCKED = 64 << 20
"""Bytes under which NCCL cannot start between nodes: a channel's buffer has 4 MiB (NCCL_BUFFSIZE), and queues come
to it. The limits that systems come with are 64 KiB and 8 MiB."""


def machine(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield what shows only on GPUs, and a limit of locked memory that ends a run over several nodes."""
    if run.hardware.is_cpu:
        return
    here = device.driver_gpu_count()
    if here < run.hardware.gpus_per_node:
        yield NotChecked("GPUs", f"{run.hardware.gpus_per_node} asked for, {here} here: drivers, kernels and links")
    yield NotChecked("GPU memory", "what other programs hold of it when the run starts")
    yield from _locked_memory(run)


def _locked_memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    limit, placement = run.hardware.lockable_bytes, run.cfg.trainer.placement
    if limit is None:
        return
    text = f"{limit / 1e6:g} MB"
    nodes = max(getattr(placement, f"{role}_num_nodes") for role in active_roles(run.cfg))
    if nodes > 1 and limit < LEAST_LOCKED:
        why = f"NCCL registers buffers with RDMA cards between nodes, {LEAST_LOCKED / 1e6:.0f} MB and more"
        yield Problem("locked memory", text, f"{why}: {UNLOCK}")
    else:
        yield NotChecked("locked memory", f"{text} may be registered with RDMA cards; if NCCL asks for more: {UNLOCK}")
