"""The roles of a run (policy, reference, critic, teachers), their ranks and layouts, the policy's adapters, and the
transport of weights from the policy to the engines.

Each adapter has its own configuration, that of a run that trains only this adapter. Engines, checks and the memory
budget read it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.config.derive import is_address, preferences, reward_model
from skyrl_megatron.config.fields import Section, field_types
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.layout import ParallelConfig
from skyrl_megatron.config.parse import convert
from skyrl_megatron.config.table import ROLES
from skyrl_megatron.errors import ConfigError
from skyrl_megatron.plugins import TRANSPORTS

if TYPE_CHECKING:
    from skyrl_megatron.config.schema.models import MegatronConfig, PlacementConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


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
    """Return whether the role trains the multi-token-prediction layer of its model."""
    return role == "policy" and cfg.trainer.policy.megatron_config.mtp.train


def balances_experts(cfg: SkyRLTrainConfig, role: str) -> bool:
    """Return whether the role chooses its micro-batches by the experts of their tokens, if its model has experts."""
    megatron = getattr(cfg.trainer, role).megatron_config
    replays = megatron.moe_enable_routing_replay and cfg.trainer.use_sample_packing
    return bool(megatron.moe_balance_experts and replays and megatron.expert_model_parallel_size > 1)


def active_roles(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the roles that a run starts: ``policy``, ``ref`` if a KL term needs a separate reference model, and
    ``critic`` and ``teacher`` if they have a model."""
    roles = ["policy"]
    if needs_reference(cfg) and not policy_is_reference(cfg):
        roles.append("ref")
    roles += [role for role in ("critic", "teacher") if getattr(cfg.trainer, role).model.path is not None]
    return tuple(roles)


def is_frozen(role: str) -> bool:
    """Return whether a role only computes log-probs and is never trained."""
    return not ROLES[role].trained


def has_value_head(cfg: SkyRLTrainConfig, role: str) -> bool:
    """Return whether a role's model ends with a value in place of the vocabulary: a critic, a teacher that is a reward
    model, and the policy of a run that trains one."""
    if role == "teacher":
        return teacher_is_reward_model(cfg)
    return role == "critic" or (role == "policy" and reward_model(cfg) is not None)


def teacher_is_reward_model(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the teacher on ranks gives scores and not log-probs: its folder is one for sequence
    classification, as ``skyrl-megatron reward`` exports it."""
    if cfg.trainer.teacher.model.path is None:
        return False
    try:
        described = read_hf_config(cfg, "teacher") or {}
    except ConfigError:  # reported where the models are checked
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in described.get("architectures") or ())


def distils_in_reward(cfg: SkyRLTrainConfig) -> bool:
    """Return whether log-probs of a teacher change the rewards."""
    return bool(cfg.trainer.algorithm.distillation.reward_coef) and not teacher_is_reward_model(cfg)


def has_teacher(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the run has a teacher, on ranks or at an address."""
    return cfg.trainer.teacher.model.path is not None or bool(cfg.trainer.teacher.models)


def needs_reference(cfg: SkyRLTrainConfig) -> bool:
    """Return whether a KL term, or a loss of preferences, compares the policy with a reference."""
    algorithm, pairs = cfg.trainer.algorithm, preferences(cfg)
    return (pairs is not None and pairs.needs_reference) or algorithm.use_kl_loss or algorithm.use_kl_in_reward


def policy_is_reference(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the policy with its adapters disabled serves as the reference, without a second model."""
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
    """Return whether a role's ranks share the policy's GPUs and take turns with it."""
    placement = cfg.trainer.placement
    return placement.colocate_all or (role == "ref" and placement.colocate_policy_ref)


def engine_ranks(cfg: SkyRLTrainConfig) -> int:
    """Count the ranks of one engine."""
    engine = cfg.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def weight_transport(cfg: SkyRLTrainConfig) -> str:
    """Return the name of the transport that sends weights from the policy to the engines.

    Two processes on one GPU cannot be in one NCCL group. If trainer and engines share GPUs, weights are passed by
    CUDA IPC.
    """
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    # A transport of a plugin is used as it is: only its author knows whether it works on a shared GPU.
    replaceable = engine.weight_sync_backend in TRANSPORTS.built_in
    return "ipc" if placement.colocate_all and replaceable else engine.weight_sync_backend


def ranks_exchange_weights(cfg: SkyRLTrainConfig) -> bool:
    """Return whether the policy's ranks exchange the weights that the engine workers on their GPUs need.

    A worker cannot open the memory of a rank on another node. With data parallelism vLLM shows a worker only its own
    GPUs, so that it cannot open the memory of a rank on another GPU either.
    """
    engine, placement = cfg.generator.inference_engine, cfg.trainer.placement
    return weight_transport(cfg) == "ipc" and not placement.policy_num_nodes == engine.data_parallel_size == 1


def weight_bucket_sizes(cfg: SkyRLTrainConfig) -> tuple[int, ...]:
    """Return the possible sizes of weight buckets in bytes, ascending.

    If trainer and engines have separate devices, the first sync measures these sizes and chooses one; otherwise the
    last is used. Small buckets reduce bandwidth between GPUs; large ones take memory of GPUs that roles share.
    """
    if cfg.generator.inference_engine.weight_sync_backend != device.NCCL:
        return 4 << 20, 16 << 20
    return (64 << 20,) if cfg.trainer.placement.colocate_all else (16 << 20, 64 << 20, 256 << 20)


def weight_path(cfg: SkyRLTrainConfig, *, sliced: bool) -> str:
    """Describe how weights are sent to the engines. ``sliced``: each worker receives only the slices it needs."""
    what, carrier = "own part" if sliced else "all weights", weight_transport(cfg)
    if ranks_exchange_weights(cfg):
        return "own part by exchange and shared memory"
    return f"{what} by shared memory" if carrier == "ipc" else f"{what} over {carrier}"


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Position of a rank in both grids of its layout."""

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    edp: int


def rank_position(parallel: ParallelConfig, rank: int) -> RankPosition:
    """Return the position of a rank in Megatron's order: tp fastest, then cp, ep, dp, pp (parallel_state.py,
    ``RankGenerator``)."""
    per_stage = parallel.world_size // parallel.pp
    pp, within = divmod(rank, per_stage)
    dense, tp = divmod(within, parallel.tp)
    dp, cp = divmod(dense, parallel.cp)
    experts, etp = divmod(within, parallel.etp)
    edp, ep = divmod(experts, parallel.ep)
    return RankPosition(pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=edp)


def teacher_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names of the teachers; ``("",)`` for one without a name, () without teachers. The first teacher
    scores the rows that name none."""
    return tuple(cfg.trainer.teacher.models) or (("",) if has_teacher(cfg) else ())


def teacher_addresses(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return name → address of the teachers that run outside this job."""
    return {name: model for name, model in cfg.trainer.teacher.models.items() if is_address(model)}


def teachers_on_ranks(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → configuration of a teacher on ranks: that of a run with only this teacher."""
    addresses = teacher_addresses(cfg)
    return {name: _with_one_teacher(cfg, name) for name in teacher_names(cfg) if name not in addresses}


def _with_one_teacher(cfg: SkyRLTrainConfig, name: str) -> SkyRLTrainConfig:
    if not name:
        return cfg
    path = cfg.trainer.teacher.models[name]
    cfg = copy.copy(cfg)
    cfg.trainer = copy.copy(cfg.trainer)
    teacher = cfg.trainer.teacher = copy.copy(cfg.trainer.teacher)
    teacher.model, teacher.models = copy.copy(teacher.model), {}
    teacher.model.path = path
    return cfg


def role_key(name: str) -> str:
    """Return the key of a teacher on ranks in :func:`role_configs`."""
    return f"teacher/{name}" if name else "teacher"


def role_configs(cfg: SkyRLTrainConfig) -> dict[str, tuple[str, SkyRLTrainConfig]]:
    """Return key → (role, configuration that its ranks read) of every model that a run starts on ranks."""
    configs: dict[str, tuple[str, SkyRLTrainConfig]] = {}
    for role in active_roles(cfg):
        if role == "teacher":
            configs |= {role_key(name): (role, of_teacher) for name, of_teacher in teachers_on_ranks(cfg).items()}
        else:
            configs[role] = (role, cfg)
    return configs


ADAPTERS_KEY = "trainer.policy.model.lora.adapters"
ADAPTER_KEY = "adapter"
"""Column of the data that names the adapter of a row."""
OF_ALL_ADAPTERS = ("adapters", "sync_mode", "lora_sync_path", "offload_after_step")
"""Settings that all adapters of a run share."""


def adapter_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names of the policy's adapters; ``("",)`` for one adapter without a name, or without adapters."""
    return tuple(cfg.trainer.policy.model.lora.adapters) or ("",)


def sends_adapters_alone(cfg: SkyRLTrainConfig) -> bool:
    """Return whether engines hold the base model and get adapters, instead of merged weights."""
    lora = cfg.trainer.policy.model.lora
    return lora.rank > 0 and lora.sync_mode == "memory"


def role_part(role: str, adapter: str) -> str:
    """Return the part of a checkpoint with the trained weights of a role: ``policy``, or ``policy/math`` for a named
    adapter."""
    return f"{role}/{adapter}" if adapter else role


def adapter_configs(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → configuration of a run that trains only this adapter; ``{"": cfg}`` without names.

    Sections that no adapter changes are shared with ``cfg``.
    """
    adapters = cfg.trainer.policy.model.lora.adapters
    return {name: _with_one_adapter(cfg, changes or {}) for name, changes in adapters.items()} or {"": cfg}


def _with_one_adapter(cfg: SkyRLTrainConfig, changes: dict[str, Any]) -> SkyRLTrainConfig:
    cfg = copy.copy(cfg)
    cfg.trainer = copy.copy(cfg.trainer)
    policy = cfg.trainer.policy = copy.copy(cfg.trainer.policy)
    policy.model, policy.optimizer_config = copy.copy(policy.model), copy.copy(policy.optimizer_config)
    policy.model.lora = copy.copy(policy.model.lora)
    policy.model.lora.adapters = {}
    for key, value in changes.items():
        section = adapter_section(cfg, key)
        assert section is not None, key
        setattr(section, key, convert(field_types(type(section))[key], value))
    return cfg


def adapter_section(cfg: SkyRLTrainConfig, key: str) -> Section | None:
    """Return the section that an adapter's setting changes; None for an unknown setting."""
    policy = cfg.trainer.policy
    sections: tuple[Section, ...] = (policy.model.lora, policy.optimizer_config)
    return next(
        (section for section in sections if key in field_types(type(section)) and key not in OF_ALL_ADAPTERS), None
    )
