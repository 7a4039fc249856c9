"""The roles of a run (policy, reference, critic, teachers), their ranks and layouts, the policy's adapters, and how
weights travel from the policy to the engines.

An adapter is configured as a run that trains it alone would be, and that is how everything below reads it: the engine,
the checks and the memory plan ask for the configuration of each.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.config.derive import is_address
from skyrl_megatron.config.fields import Section, field_types
from skyrl_megatron.config.parse import Mismatch, convert
from skyrl_megatron.config.rules.layout import ParallelConfig
from skyrl_megatron.errors import Problem
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


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_A, KEY = "trainer.algorithm.", "trainer.teacher.models"


def teacher_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names, the first of which judges rows that name none; ``("",)`` of one without a name, () of none."""
    return tuple(cfg.trainer.teacher.models) or (("",) if has_teacher(cfg) else ())


def teacher_addresses(cfg: SkyRLTrainConfig) -> dict[str, str]:
    """Return name → address of the teachers that are served elsewhere."""
    return {name: model for name, model in cfg.trainer.teacher.models.items() if is_address(model)}


def teachers_on_ranks(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → the configuration of a run that has this teacher alone, as its ranks read it."""
    elsewhere = teacher_addresses(cfg)
    return {name: _alone(cfg, name) for name in teacher_names(cfg) if name not in elsewhere}


def _alone(cfg: SkyRLTrainConfig, name: str) -> SkyRLTrainConfig:
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
    """Return what a teacher on ranks is called among the roles of a run."""
    return f"teacher/{name}" if name else "teacher"


def role_configs(cfg: SkyRLTrainConfig) -> dict[str, tuple[str, SkyRLTrainConfig]]:
    """Return what a run starts on ranks, by its key: its role, and the configuration that its ranks read."""
    found: dict[str, tuple[str, SkyRLTrainConfig]] = {}
    for role in active_roles(cfg):
        if role == "teacher":
            found |= {role_key(name): (role, own) for name, own in teachers_on_ranks(cfg).items()}
        else:
            found[role] = (role, cfg)
    return found


def teacher_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield what is wrong between teachers and what is to be learned from them."""
    algorithm, teacher = cfg.trainer.algorithm, cfg.trainer.teacher
    wanted = algorithm.distillation
    if not has_teacher(cfg):
        if algorithm.advantage_estimator == "distillation" or wanted.reward_coef or wanted.loss_coef:
            fix = "distillation needs a teacher: name its model, or trainer.teacher.models"
            yield Problem("trainer.teacher.model.path", None, fix)
        return
    if teacher.models and teacher.model.path not in (None, *teacher.models.values()):
        yield Problem("trainer.teacher.model.path", teacher.model.path, f"is none of {KEY}: name each of them there")
    for name in teacher.models:
        if not _NAME.fullmatch(name):
            yield Problem(KEY, name, "a name is made of letters, digits, _ and -")
    if not wanted.reward_coef and not wanted.loss_coef:
        fix = "nothing is learned from it: set distillation.reward_coef or .loss_coef, or the estimator distillation"
        key, value = (KEY, teacher.models) if teacher.models else ("trainer.teacher.model.path", teacher.model.path)
        yield Problem(key, value, fix)
    if wanted.divergence_alone and not wanted.loss_coef:
        fix = "the divergence is the whole loss, and has weight 0: set distillation.loss_coef"
        yield Problem(f"{_A}distillation.divergence_alone", True, fix)
    if wanted.loss_coef and cfg.trainer.fused_lm_head_logprob:
        yield Problem("trainer.fused_lm_head_logprob", True, "distillation.loss_coef reads logits: set it to false")
    if cfg.generator.step_wise_trajectories and algorithm.advantage_estimator == "distillation":
        fix = "does not work with generator.step_wise_trajectories=true: use grpo, rloo or maxrl"
        yield Problem(f"{_A}advantage_estimator", "distillation", fix)
    for name, address in teacher_addresses(cfg).items():
        if algorithm.temperature not in (None, 1.0):
            fix = f"the engine at {address} gives log-probs at temperature 1: set it to 1, or put {name} on ranks"
            yield Problem("generator.sampling_params.temperature", algorithm.temperature, fix)


ADAPTERS_KEY = "trainer.policy.model.lora.adapters"
ADAPTER_KEY = "adapter"
"""Column of a data row that says which adapter it belongs to."""
_OF_ALL = ("adapters", "sync_mode", "lora_sync_path", "offload_after_step")
"""What cannot differ between adapters of a run."""
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]+")


def adapter_names(cfg: SkyRLTrainConfig) -> tuple[str, ...]:
    """Return the names of the policy's adapters; ``("",)`` where there is one without a name, or none."""
    return tuple(cfg.trainer.policy.model.lora.adapters) or ("",)


def role_part(role: str, adapter: str) -> str:
    """Return where a checkpoint has what is trained of a role: ``policy``, or ``policy/math`` of a named adapter."""
    return f"{role}/{adapter}" if adapter else role


def adapter_configs(cfg: SkyRLTrainConfig) -> dict[str, SkyRLTrainConfig]:
    """Return name → the configuration of a run that trains this adapter alone; ``{"": cfg}`` without names.

    Sections that no adapter changes are those of ``cfg`` itself.
    """
    own = cfg.trainer.policy.model.lora.adapters
    return {name: _adapter_problems_alone(cfg, changes or {}) for name, changes in own.items()} or {"": cfg}


def _adapter_problems_alone(cfg: SkyRLTrainConfig, changes: dict[str, Any]) -> SkyRLTrainConfig:
    cfg = copy.copy(cfg)
    cfg.trainer = copy.copy(cfg.trainer)
    policy = cfg.trainer.policy = copy.copy(cfg.trainer.policy)
    policy.model, policy.optimizer_config = copy.copy(policy.model), copy.copy(policy.optimizer_config)
    policy.model.lora = copy.copy(policy.model.lora)
    policy.model.lora.adapters = {}
    for key, value in changes.items():
        section = _section(cfg, key)
        assert section is not None, key
        setattr(section, key, convert(field_types(type(section))[key], value))
    return cfg


def _section(cfg: SkyRLTrainConfig, key: str) -> Section | None:
    """Return the section that an adapter's setting changes; None where there is none."""
    policy = cfg.trainer.policy
    sections: tuple[Section, ...] = (policy.model.lora, policy.optimizer_config)
    return next((each for each in sections if key in field_types(type(each)) and key not in _OF_ALL), None)


def adapter_problems(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield everything wrong with the names and settings of several adapters."""
    lora, trainer = cfg.trainer.policy.model.lora, cfg.trainer
    if not lora.adapters:
        return
    if not lora.rank:
        yield Problem(ADAPTERS_KEY, ", ".join(lora.adapters), "adapters are off: set trainer.policy.model.lora.rank")
    for name, changes in lora.adapters.items():
        if not _ADAPTER_NAME.fullmatch(name):
            yield Problem(
                ADAPTERS_KEY, name, "a name is made of letters, digits, _ and -: it names folders and requests"
            )
        for key, value in (changes or {}).items():
            yield from _setting(cfg, f"{ADAPTERS_KEY}.{name}.{key}", key, value)
    if len(lora.adapters) > 1 and trainer.algorithm.use_kl_in_reward and trainer.algorithm.kl_ctrl.type == "adaptive":
        fix = "one coefficient would follow all adapters together: use fixed, or train them one by one"
        yield Problem("trainer.algorithm.kl_ctrl.type", "adaptive", fix)
    if len(lora.adapters) > 1 and trainer.critic.model.path is not None:
        fix = "one critic would learn from the rows of all adapters: take an estimator without one"
        yield Problem("trainer.critic.model.path", trainer.critic.model.path, fix)


def _setting(cfg: SkyRLTrainConfig, place: str, key: str, value: Any) -> Iterator[Problem]:
    section = _section(cfg, key)
    if section is None:
        policy = cfg.trainer.policy
        known = {*field_types(type(policy.model.lora)), *field_types(type(policy.optimizer_config))} - {*_OF_ALL}
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        fix = "an adapter has settings of policy.model.lora and policy.optimizer_config of its own; "
        yield Problem(place, value, fix + f"{'nearest' if near else 'there are'}: {', '.join(near or sorted(known))}")
        return
    try:
        converted = convert(field_types(type(section))[key], value)
    except Mismatch as mismatch:
        yield Problem(place, value, str(mismatch))
        return
    if key == "rank" and not converted:
        yield Problem(place, value, "an adapter has at least rank 1: leave it out to take that of all")
