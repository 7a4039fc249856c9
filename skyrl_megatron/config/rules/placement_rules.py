"""Rules of layouts and devices: parallel degrees of each role, GPUs, and who shares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import default_of
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.roles import (
    active_roles,
    engine_ranks,
    is_frozen,
    role_configs,
    role_layout,
    role_world_size,
    shares_policy_gpus,
)
from skyrl_megatron.config.rules.layout import ParallelConfig, layout_problems
from skyrl_megatron.config.rules.megatron_rules import megatron_problems
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.models import FSDPConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_FSDP_INSTEAD = {
    "cpu_offload": "megatron_config.optimizer_config_kwargs.optimizer_cpu_offload=true",
    "reshard_after_forward": "megatron_config.tensor_model_parallel_size or expert_model_parallel_size",
    "fsdp_size": "megatron_config.tensor_model_parallel_size and its fellow degrees",
    "mixed_precision": "trainer.bf16 and megatron_config.ddp_config.grad_reduce_in_fp32",
    "wrap_policy": "megatron_config.transformer_config_kwargs",
}


def placement_problems(
    cfg: SkyRLTrainConfig, hardware: Hardware, configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield everything wrong with layouts and devices. ``configs``: role → ``config.json``, where it is at hand."""
    policy = (role_layout(cfg, "policy"), cfg.trainer.policy.megatron_config, configs.get("policy"))
    for role in active_roles(cfg):
        section = f"trainer.{role}.megatron_config."
        own = (role_layout(cfg, role), getattr(cfg.trainer, role).megatron_config, configs.get(role))
        if role == "policy" or own != policy:  # the same problem is named once
            yield from _layout(own[0], own[2] or {}, section)
            yield from megatron_problems(cfg, role, section, hardware, own[2] or {})
        yield from _no_adapter(cfg, role)
        yield from _fsdp(getattr(cfg.trainer, role).fsdp_config, f"trainer.{role}.fsdp_config.")
    yield from _colocation(cfg)
    if hardware.is_cpu:
        yield from _cpu_engines(cfg)
    else:
        yield from _gpus(cfg, hardware)
        yield from _engine_nodes(cfg, hardware)


def _layout(parallel: ParallelConfig, hf: Mapping[str, Any], section: str) -> Iterator[Problem]:
    yield from layout_problems(parallel, model_dimensions(hf), section)
    if parallel.etp > 1 and hf.get("model_type") == "gpt_oss":
        fix = "experts with biases cannot be cut: set it to 1"
        yield Problem(f"{section}expert_tensor_parallel_size", parallel.etp, fix)


def _no_adapter(cfg: SkyRLTrainConfig, role: str) -> Iterator[Problem]:
    rank = getattr(cfg.trainer, role).model.lora.rank
    if is_frozen(role) and rank:
        named = {"ref": "the reference", "teacher": "a teacher"}[role]
        yield Problem(f"trainer.{role}.model.lora.rank", rank, f"{named} is never trained: leave it out")
    if role == "critic" and rank:
        yield Problem("trainer.critic.model.lora.rank", rank, "a critic trains all of its weights: leave it out")


def _fsdp(fsdp: FSDPConfig, section: str) -> Iterator[Problem]:
    for name, instead in _FSDP_INSTEAD.items():
        value = getattr(fsdp, name)
        if value != default_of(type(fsdp), name):
            yield Problem(f"{section}{name}", value, f"belongs to FSDP backends; here it is {instead}")


def _colocation(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    placement, engine, roles = cfg.trainer.placement, cfg.generator.inference_engine, active_roles(cfg)
    policy = role_world_size(placement, "policy")
    for role in roles[1:]:
        if not shares_policy_gpus(cfg, role):
            continue
        switch = "colocate_all" if placement.colocate_all else "colocate_policy_ref"
        for name in ("num_nodes", "num_gpus_per_node"):
            own, needed = getattr(placement, f"{role}_{name}"), getattr(placement, f"policy_{name}")
            if own != needed:
                fix = f"shares the policy's GPUs ({switch}=true): must equal policy_{name}={needed}"
                yield Problem(f"trainer.placement.{role}_{name}", own, fix)
    if placement.colocate_all and engine.run_engines_locally:
        ranks = engine.num_engines * engine_ranks(cfg)
        if ranks != policy:
            fix = (
                f"engines take num_engines · tp · pp · dp = {ranks} GPUs and share the policy's {policy} "
                "(colocate_all=true): make both equal"
            )
            yield Problem("generator.inference_engine.num_engines", engine.num_engines, fix)
        elif _straddle(engine_ranks(cfg), placement.policy_num_gpus_per_node, engine.distributed_executor_backend):
            fix = (
                f"an engine takes tp · pp · dp = {engine_ranks(cfg)} GPUs of one node, or several whole nodes "
                f"(colocate_all=true): must divide policy_num_gpus_per_node={placement.policy_num_gpus_per_node}, or "
                "be a multiple of it with distributed_executor_backend=ray"
            )
            yield Problem("generator.inference_engine.tensor_parallel_size", engine.tensor_parallel_size, fix)


def _straddle(ranks: int, per_node: int, executor: str) -> bool:
    """Return whether engines on a node's GPUs would end within the next one, or cannot lie on several."""
    return bool(per_node % ranks and ranks % per_node) or (ranks > per_node and executor != "ray")


def gpus_asked(cfg: SkyRLTrainConfig) -> dict[str, int]:
    """Count the devices that each role takes for itself; roles that share another's are left out."""
    placement, roles = cfg.trainer.placement, active_roles(cfg)
    asked = {"policy": role_world_size(placement, "policy")}
    if placement.colocate_all:
        return asked
    if "ref" in roles and not placement.colocate_policy_ref:
        asked["ref"] = role_world_size(placement, "ref")
    for role in ("critic", "teacher"):
        if role in roles:
            asked[role] = role_world_size(placement, role) * sum(
                name == role for name, _ in role_configs(cfg).values()
            )
    engine = cfg.generator.inference_engine
    if engine.run_engines_locally:
        asked["engines"] = engine.num_engines * engine_ranks(cfg)
    return asked


def _cpu_engines(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    """Yield layouts in which vLLM's engines for CPU start and end at their first request."""
    engine = cfg.generator.inference_engine
    if not engine.run_engines_locally or engine.backend != "vllm":
        return
    for name in ("data", "expert"):
        if (size := getattr(engine, f"{name}_parallel_size")) > 1:
            fix = "vLLM's engines for CPU end at their first request so: set it to 1, or run on GPUs"
            yield Problem(f"generator.inference_engine.{name}_parallel_size", size, fix)


def _gpus(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    placement, asked = cfg.trainer.placement, gpus_asked(cfg)
    for role in asked:
        per_node = getattr(placement, f"{role}_num_gpus_per_node", 0)
        if per_node > hardware.gpus_per_node:
            fix = f"a node has {hardware.gpus_per_node} GPUs: use more nodes, or fewer GPUs"
            yield Problem(f"trainer.placement.{role}_num_gpus_per_node", per_node, fix)
    total = sum(asked.values())
    if hardware.nodes is not None and total > hardware.gpus_per_node * hardware.nodes:
        listed = " + ".join(f"{count} ({role})" for role, count in asked.items())
        fix = (
            f"the run takes {listed} = {total} GPUs, and there are {hardware.gpus_per_node * hardware.nodes}: take "
            "fewer, share them (trainer.placement.colocate_all=true), or join a larger Ray cluster (RAY_ADDRESS)"
        )
        yield Problem("trainer.placement.policy_num_gpus_per_node", placement.policy_num_gpus_per_node, fix)


def _engine_nodes(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Check engines of more GPUs than a node has: only Ray starts workers on another node, and no further dp rank."""
    engine, ranks, per_node = cfg.generator.inference_engine, engine_ranks(cfg), hardware.gpus_per_node
    if not engine.run_engines_locally:
        return
    executor = engine.distributed_executor_backend
    if executor == "uni" and ranks > 1:
        fix = f"holds one rank, and an engine has tp · pp · dp = {ranks}: set it to mp, or ray for engines over nodes"
        yield Problem("generator.inference_engine.distributed_executor_backend", executor, fix)
    elif ranks > per_node and executor != "ray":
        fix = f"an engine of tp · pp · dp = {ranks} GPUs lies on several nodes of {per_node}: set it to ray"
        yield Problem("generator.inference_engine.distributed_executor_backend", executor, fix)
    if ranks > per_node and engine.data_parallel_size > 1:
        fix = f"the engine lies on several nodes of {per_node} GPUs: set it to 1 and take more num_engines instead"
        yield Problem("generator.inference_engine.data_parallel_size", engine.data_parallel_size, fix)
