"""What lies in the memory of a node: states that left the GPUs, copies of checkpoints, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_megatron.config.rules.role_layout import engine_ranks, role_world_size
from skyrl_megatron.entrypoints.memory.phases import GENERATION, TRAINING, Part, Phase, resident
from skyrl_megatron.entrypoints.memory.roles import RoleModel

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

BLOCK_BYTES = 1 << 28
"""States leave into pinned blocks of this size (``runtime/offload.py``)."""
RANK_PROCESS_BYTES = 4 * 10**9
"""A trainer rank's own memory: libraries, staging buffers, batches."""
ENGINE_PROCESS_BYTES = 5 * 10**9
"""An engine rank's."""
DRIVER_BYTES = 12 * 10**9
"""Driver, Ray and its object store."""


def node_phase(cfg: SkyRLTrainConfig, models: dict[str, RoleModel]) -> Phase:
    """Return what the fullest node holds while engines generate, when most has left the GPUs."""
    placement, engine = cfg.trainer.placement, cfg.generator.inference_engine
    parts = [Part("driver, Ray and its object store", DRIVER_BYTES)]
    for role, model in models.items():
        here: int = getattr(placement, f"{role}_num_gpus_per_node")
        parts.append(Part(f"{here} {role} processes", here * RANK_PROCESS_BYTES))
        parts += _of_ranks(cfg, role, model, here)
    if engine.run_engines_locally:
        ranks = engine.num_engines * engine_ranks(cfg)
        if placement.colocate_all:
            ranks = min(ranks, placement.policy_num_gpus_per_node)
        parts.append(Part(f"{ranks} engine processes", ranks * ENGINE_PROCESS_BYTES))
    return Phase("a node", "host memory", tuple(part for part in parts if part.nbytes))


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def copied_bytes(model: RoleModel, stage: int) -> int:
    """Return the bytes of a rank's state that are lost with it: of adapters without the model below."""
    state, factors = model.state(stage), model.factors(stage)
    weights = state.weights + state.buffers if factors is None else factors.parameters * model.kernels.width
    return weights + state.optimizer + state.host_optimizer * 3 // 4


def _of_ranks(cfg: SkyRLTrainConfig, role: str, model: RoleModel, here: int) -> list[Part]:
    """Return what ``here`` neighbouring ranks keep on the host, at most."""
    away = resident(cfg, role, TRAINING, role) - resident(cfg, role, GENERATION) - {"gradients"}
    per_stage = role_world_size(cfg.trainer.placement, role) // model.parallel.pp
    stages = range(-(-here // per_stage))
    most = max(range(model.parallel.pp), key=lambda stage: model.state(stage).device)
    chosen = [most] if len(stages) == 1 else list(stages)
    states = [model.state(stage) for stage in chosen]
    share = here / len(states)

    def total(size: float) -> int:
        return round(size * share)

    offloaded = sum(_blocks(getattr(state, what)) for state in states for what in away)
    parts = [
        Part(f"{role} {' and '.join(sorted(away, reverse=True))} off the GPU", total(offloaded)),
        Part(f"{role} optimizer of optimizer_cpu_offload", total(sum(state.host_optimizer for state in states))),
    ]
    unscaled = sum(state.unscaled for state in states)
    parts.append(Part(f"{role} optimizer unscaled for a checkpoint", total(unscaled)))
    if model.trained and model.settings.megatron_config.async_dist_ckpt_save:
        copied = sum(state.weights / max(model.parallel.dp_cp, 1) + state.optimizer for state in states) + unscaled
        copied += sum(state.host_optimizer * 3 / 4 for state in states)  # but for the gradients
        parts.append(Part(f"{role} checkpoint while it is written", total(copied)))
    healing = cfg.trainer.healing
    if healing.enabled and healing.copies == "neighbour" and model.trained:
        kept = sum(2 * _blocks(copied_bytes(model, stage)) for stage in chosen)
        parts.append(Part(f"{role} state kept for a lost rank, two copies", total(kept)))
    return [part for part in parts if part.nbytes]
