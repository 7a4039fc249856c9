"""Does the run fit into the memory of its GPUs and nodes?"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.rules.layout import layout_problems
from skyrl_megatron.config.rules.role_layout import active_roles, role_layout
from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import ConfigError, Problem


def memory(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield a problem for each phase that does not fit; what is not known where sizes or models are not at hand."""
    hardware = run.hardware
    if hardware.is_cpu or not run.training:
        return
    missing = {"--gpu h100": hardware.gpu_bytes, "--host-memory 2TB": hardware.host_bytes}
    asked = [option for option, known in missing.items() if known is None]
    if asked:
        yield NotChecked("memory", f"how large GPUs or nodes are is not known here: add {' and '.join(asked)}")
    if len(asked) == len(missing):
        return
    from skyrl_megatron.entrypoints.memory.budget import Budget, parameter_tables  # loads torch
    from skyrl_megatron.entrypoints.memory.report import problems

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by those who need the model
        return
    if set(tables) != set(active_roles(run.cfg)):
        yield NotChecked("memory", "config.json of the model is not here")
        return
    for role in active_roles(run.cfg):
        dims = model_dimensions(tables[role].plan.hf_config)
        if layout_problems(role_layout(run.cfg, role), dims):
            return  # reported already
    yield from problems(run.cfg, tables, Budget.of(run.cfg, tables, hardware))
