"""How many layers a training pass recomputes: with ``recompute_granularity=auto``, the fewest with which it fits.

Recomputing a layer repeats its forward pass, which adds a third to the layer's training FLOPs. The choice keeps the
activations of as many layers as the budget allows (``recompute_method=block`` recomputes the first layers of each
chunk) and leaves :data:`SPARE` of the GPU free, because experts may be less balanced than the estimate.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.derive import derive
from skyrl_megatron.config.layout import stage_layers
from skyrl_megatron.config.roles import active_roles, is_frozen
from skyrl_megatron.config.rules.exchange_rules import OVERLAP
from skyrl_megatron.config.schema.models import AUTO
from skyrl_megatron_observe.estimate.memory_phases import TRAINING, RoleModel, gpu_phases, role_models

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

SPARE = 0.1
"""Share of a GPU that a training pass must leave free if it does not recompute all layers."""


def choose_recomputation(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], gpu: int) -> None:
    """Replace ``recompute_granularity=auto`` of each trained role by what fits into GPUs of ``gpu`` bytes.

    Changes ``cfg``, which must be valid except for its memory. A critic whose options are the policy's has the same
    choice, with which both must fit.
    """
    for role in active_roles(cfg):
        if is_frozen(role) or _kwargs(cfg, role).get("recompute_granularity") != AUTO:
            continue
        parallel = RoleModel.of(cfg, role, tables[role]).parallel
        layers = len(tables[role].plan.shape.kinds)
        longest = max(
            len(stage_layers(parallel, layers, stage, chunk))
            for stage in range(parallel.pp)
            for chunk in range(parallel.vpp)
        )
        fewest, most = 0, 0 if _kwargs(cfg, role).get(OVERLAP) else longest
        while fewest < most and cfg.trainer.gradient_checkpointing:
            tried = (fewest + most) // 2
            if _fits(_with(cfg, role, tried, longest), tables, gpu):
                most = tried
            else:
                fewest = tried + 1
        _set(cfg, role, most, longest)
        derive(cfg)


def _kwargs(cfg: SkyRLTrainConfig, role: str) -> dict[str, Any]:
    kwargs: dict[str, Any] = getattr(cfg.trainer, role).megatron_config.transformer_config_kwargs
    return kwargs


def _with(cfg: SkyRLTrainConfig, role: str, layers: int, longest: int) -> SkyRLTrainConfig:
    changed: SkyRLTrainConfig = pickle.loads(pickle.dumps(cfg))
    _set(changed, role, layers, longest)
    derive(changed)
    return changed


def _set(cfg: SkyRLTrainConfig, role: str, layers: int, longest: int) -> None:
    """Recompute ``layers`` of each chunk, of which the longest has ``longest``."""
    granularity, method, count = ("full", "block", layers) if layers < longest else ("full", "uniform", 1)
    if not layers:
        granularity, method, count = None, None, None  # type: ignore[assignment]
    _kwargs(cfg, role).update(recompute_granularity=granularity, recompute_method=method, recompute_num_layers=count)


def _fits(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], gpu: int) -> bool:
    phases = gpu_phases(cfg, role_models(cfg, tables), gpu)
    return all(phase.total <= gpu * (1 - SPARE) for phase in phases if phase.name.endswith(TRAINING))


def recomputation(model: RoleModel) -> str:
    """Say what a trained role recomputes and what it costs, at most: the head is not recomputed."""
    again, parallel = model.recompute, model.parallel
    layers = len(model.table.plan.shape.kinds)
    if again.granularity is None:
        return "recomputation: none"
    if again.granularity == "selective":
        return f"recomputation: {', '.join(sorted(again.modules))} of each layer"
    chunks = [
        len(stage_layers(parallel, layers, stage, chunk))
        for stage in range(parallel.pp)
        for chunk in range(parallel.vpp)
    ]
    count = sum(min(again.layers, size) for size in chunks) if again.method == "block" else layers
    return f"recomputation: {count} of {layers} layers, up to {count / layers / 3:.0%} more FLOPs in training"
