"""Which roles a run has, how many ranks each takes, how those are laid out, and what carries weights to engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_megatron import device
from skyrl_megatron.config.rules.layout import ParallelConfig
from skyrl_megatron.plugins import TRANSPORTS

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.megatron import MegatronConfig
    from skyrl_megatron.config.schema.roles import PlacementConfig
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig


def parallel_config(megatron: MegatronConfig, world_size: int) -> ParallelConfig:
    """Return the layout of a model over ``world_size`` ranks."""
    return ParallelConfig(
        world_size=world_size,
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or 1,
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        overlap_p2p=megatron.transformer_config_kwargs.get("overlap_p2p_comm"),
    )


def trains_draft(cfg: SkyRLTrainConfig, role: str) -> bool:
    """Whether the role's model has the layer of multi-token prediction, and trains it."""
    return role == "policy" and cfg.trainer.policy.megatron_config.mtp.train


def active_roles(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the roles that a run starts: ``policy``, ``ref`` if a KL term needs one of its own, ``critic`` and
    ``teacher`` if they have a model."""
    roles = ["policy"]
    if needs_reference(cfg) and not policy_is_reference(cfg):
        roles.append("ref")
    roles += [role for role in ("critic", "teacher") if getattr(cfg.trainer, role).model.path is not None]
    return tuple(roles)


def is_frozen(role: str) -> bool:
    """Return whether a role scores and is never trained."""
    return role in ("ref", "teacher")


def has_teacher(cfg: SkyRLTrainConfig) -> bool:
    """Return whether somebody teaches the policy, on ranks or behind an address."""
    return cfg.trainer.teacher.model.path is not None or bool(cfg.trainer.teacher.models)


def needs_reference(cfg: SkyRLTrainConfig) -> bool:
    """Return whether a KL term compares the policy with a reference."""
    algorithm = cfg.trainer.algorithm
    return algorithm.use_kl_loss or algorithm.use_kl_in_reward


def policy_is_reference(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the policy with its adapters switched off is the reference: no second copy of the weights."""
    policy, ref = cfg.trainer.policy.model, cfg.trainer.ref.model
    return policy.lora.rank > 0 and ref.path in (None, policy.path)


def role_world_size(placement: PlacementConfig, role: str) -> int:
    """Count the ranks of a role."""
    nodes: int = getattr(placement, f"{role}_num_nodes")
    per_node: int = getattr(placement, f"{role}_num_gpus_per_node")
    return nodes * per_node


def role_layout(cfg: SkyRLTrainConfig, role: str) -> ParallelConfig:
    """Return the layout of a role's model."""
    megatron: MegatronConfig = getattr(cfg.trainer, role).megatron_config
    return parallel_config(megatron, role_world_size(cfg.trainer.placement, role))


def shares_policy_gpus(cfg: SkyRLTrainConfig, role: str) -> bool:
    """Return whether a role's ranks lie on the policy's GPUs, and take turns with it."""
    placement = cfg.trainer.placement
    return placement.colocate_all or (role == "ref" and placement.colocate_policy_ref)


def engine_ranks(cfg: SkyRLTrainConfig) -> int:
    """Count the ranks of one engine."""
    engine = cfg.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def weight_transport(cfg: SkyRLTrainConfig) -> str:
    """Return the name of the transport that carries weights from the policy to the engines, for both ends.

    Two processes on one GPU cannot be in one NCCL group. Where they share GPUs, the bytes stay on them, by CUDA IPC.
    """
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    own = engine.weight_sync_backend in TRANSPORTS.built_in
    return "ipc" if placement.colocate_all and own else engine.weight_sync_backend


def ranks_exchange_weights(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the policy's ranks give one another what the engine workers on their GPUs need: workers cannot
    open the memory of a rank on another node, nor, in a vLLM that shows each of its data-parallel ranks only its own
    GPUs, on another GPU."""
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    return weight_transport(cfg) == "ipc" and not placement.policy_num_nodes == engine.data_parallel_size == 1


def weight_bucket_sizes(cfg: SkyRLTrainConfig) -> tuple[int, ...]:
    """Return the sizes of weight buckets, bytes, ascending. Where trainer and engines have devices of their own, the
    first sync measures them and chooses one; else the last one counts. Between GPUs, small ones cost bandwidth; where
    roles share them, large ones cost memory of both."""
    if cfg.generator.inference_engine.weight_sync_backend != device.NCCL:
        return 4 << 20, 16 << 20
    return (64 << 20,) if cfg.trainer.placement.colocate_all else (16 << 20, 64 << 20, 256 << 20)


def weight_path(cfg: SkyRLTrainConfig, *, routed: bool) -> str:
    """Describe how weights get to the engines. ``routed``: each worker gets its own part alone."""
    what, carrier = "own part" if routed else "all weights", weight_transport(cfg)
    if ranks_exchange_weights(cfg):
        return "own part by exchange and shared memory"
    return f"{what} by shared memory" if carrier == "ipc" else f"{what} over {carrier}"


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands in both grids of its layout."""

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    edp: int


def rank_position(parallel: ParallelConfig, rank: int) -> RankPosition:
    """Place a rank in Megatron's order: tp fastest, then cp, ep, dp, pp (parallel_state.py, ``RankGenerator``)."""
    per_stage = parallel.world_size // parallel.pp
    pp, within = divmod(rank, per_stage)
    dense, tp = divmod(within, parallel.tp)
    dp, cp = divmod(dense, parallel.cp)
    experts, etp = divmod(within, parallel.etp)
    edp, ep = divmod(experts, parallel.ep)
    return RankPosition(pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=edp)
