"""Does Transformer Engine have an attention kernel for a deterministic run?"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from skyrl_megatron.config.rules.role_layout import active_roles, is_frozen
from skyrl_megatron.config.rules.training import longest_pack
from skyrl_megatron.entrypoints.checks.planned_run import PlannedRun
from skyrl_megatron.entrypoints.memory.limits import GPUS
from skyrl_megatron.errors import ConfigError, Problem

LIMIT = 1 << 30
"""Sequences · heads of a rank · tokens² from which Transformer Engine leaves cuDNN's deterministic backward on Hopper:
it asks for 128 bytes for each (2.20, ``SM90_DET_FUSED_THD_BWD_MAX_BHSS`` in dot_product_attention/utils.py)."""


def attention(run: PlannedRun) -> Iterator[Problem]:
    """Yield a problem for each role whose micro-batches are too large for a deterministic kernel.

    It would take unfused attention, or have none. What GPUs other than Hopper have shows when a model is built on one
    (``runtime/model/attention_kernels.py``).
    """
    newer = (run.hardware.gpu_bytes or 0) > GPUS["h200"] << 20
    if run.hardware.is_cpu or newer or not (run.training and run.cfg.trainer.deterministic):
        return
    from skyrl_megatron.entrypoints.memory.budget import parameter_tables  # loads torch
    from skyrl_megatron.entrypoints.memory.roles import RoleModel
    from skyrl_megatron.runtime.model.attention_kernels import no_deterministic_kernel

    try:
        tables = parameter_tables(run.cfg)
    except ConfigError:  # reported by those who need the model
        return
    sequences, tokens = longest_pack(run.cfg)
    for role in active_roles(run.cfg):
        if is_frozen(role) or role not in tables:
            continue
        model = RoleModel.of(run.cfg, role, tables[role])
        asked = model.settings.megatron_config.transformer_config_kwargs.get("attention_backend")
        unfused = asked == "unfused" or (asked is None and not run.cfg.trainer.flash_attn)
        flash = not model.table.plan.shape.mla and importlib.util.find_spec("flash_attn") is not None
        heads = model.table.plan.shape.dims["A"] // model.parallel.tp
        if model.kernels.fused and not (unfused or flash) and sequences * heads * tokens**2 >= LIMIT:
            yield no_deterministic_kernel(sequences, heads, tokens, f"trainer.{role}.megatron_config.")
