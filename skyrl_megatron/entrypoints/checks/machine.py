"""The machine that the run will get, where it is not this one."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron import device
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun


def machine(run: PlannedRun) -> Iterator[NotChecked]:
    """Yield what shows only on GPUs."""
    if run.hardware.is_cpu:
        return
    here = device.driver_gpu_count()
    if here < run.hardware.gpus_per_node:
        yield NotChecked("GPUs", f"{run.hardware.gpus_per_node} asked for, {here} here: drivers, kernels and links")
    yield NotChecked("GPU memory", "what other programs hold of it when the run starts")
