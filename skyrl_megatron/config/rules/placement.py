"""Rules of layouts and devices: parallel degrees of each role, GPUs asked for, Megatron options that contradict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import default_of
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.rules.layout import ParallelConfig, layout_problems
from skyrl_megatron.config.rules.role_layout import active_roles, engine_ranks, role_layout, role_world_size
from skyrl_megatron.config.schema.megatron import MegatronConfig
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.optimizer import FSDPConfig
    from skyrl_megatron.config.schema.root import SkyRLTrainConfig

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
            yield from _megatron(cfg, role, section, hardware)
        yield from _no_adapter(cfg, role)
        yield from _fsdp(getattr(cfg.trainer, role).fsdp_config, f"trainer.{role}.fsdp_config.")
    yield from _colocation(cfg)
    if not hardware.is_cpu:
        yield from _gpus(cfg, hardware)


def _layout(parallel: ParallelConfig, hf: Mapping[str, Any], section: str) -> Iterator[Problem]:
    yield from layout_problems(parallel, model_dimensions(hf), section)
    if parallel.etp > 1 and hf.get("model_type") == "gpt_oss":
        fix = "experts with biases cannot be cut: set it to 1"
        yield Problem(f"{section}expert_tensor_parallel_size", parallel.etp, fix)


def _megatron(cfg: SkyRLTrainConfig, role: str, section: str, hardware: Hardware) -> Iterator[Problem]:
    megatron: MegatronConfig = getattr(cfg.trainer, role).megatron_config
    if megatron.context_parallel_size > 1 and not cfg.trainer.use_sample_packing:
        fix = "needs trainer.use_sample_packing=true"
        yield Problem(f"{section}context_parallel_size", megatron.context_parallel_size, fix)
    yield from _experts(cfg, megatron, section, hardware)
    yield from _recompute(megatron, section)
    ddp = megatron.ddp_config
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        yield Problem(f"{section}ddp_config.overlap_param_gather", True, "needs overlap_grad_reduce=true")
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if hardware.is_cpu and getattr(ddp, name):
            yield Problem(f"{section}ddp_config.{name}", True, "needs GPUs: leave it out")
    if megatron.transformer_config_kwargs.get("fp8_param"):
        fix = "needs fp8 parameter gathering, which this trainer does not have: leave it out"
        yield Problem(f"{section}transformer_config_kwargs.fp8_param", True, fix)
    world = role_world_size(cfg.trainer.placement, role)
    outside = [rank for rank in megatron.torch_profiler_config.ranks if not 0 <= rank < world]
    if outside:
        fix = f"the {role} has ranks 0 to {world - 1}"
        yield Problem(f"{section}torch_profiler_config.ranks", outside, fix)


def _experts(cfg: SkyRLTrainConfig, megatron: MegatronConfig, section: str, hardware: Hardware) -> Iterator[Problem]:
    """Check options of mixture-of-experts layers."""
    if megatron.moe_enable_routing_replay:
        if not cfg.generator.inference_engine.enable_return_routed_experts:
            fix = "needs the engine's routes: set generator.inference_engine.enable_return_routed_experts=true"
            yield Problem(f"{section}moe_enable_routing_replay", True, fix)
        if megatron.transformer_config_kwargs.get("moe_router_fusion"):
            fix = "the fused router cannot replay routes: set moe_enable_routing_replay=false, or leave this out"
            yield Problem(f"{section}transformer_config_kwargs.moe_router_fusion", True, fix)
    if megatron.moe_aux_loss_coeff and megatron.moe_router_load_balancing_type in ("none", "sinkhorn"):
        kind = megatron.moe_router_load_balancing_type
        fix = f"has no effect with moe_router_load_balancing_type={kind}: set aux_loss, or 0 here"
        yield Problem(f"{section}moe_aux_loss_coeff", megatron.moe_aux_loss_coeff, fix)
    if megatron.moe_token_dispatcher_type == "flex" and hardware.is_cpu:
        yield Problem(f"{section}moe_token_dispatcher_type", "flex", "needs GPUs: use alltoall or allgather")


def _recompute(megatron: MegatronConfig, section: str) -> Iterator[Problem]:
    """Check that ``recompute_method`` and ``_num_layers`` go with full recomputation only (transformer_config.py)."""
    kwargs = megatron.transformer_config_kwargs
    granularity = kwargs.get("recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers"):
        if granularity == "selective" and kwargs.get(name) is not None:
            fix = "goes with recompute_granularity=full: leave it out"
            yield Problem(f"{section}transformer_config_kwargs.{name}", kwargs[name], fix)
        if granularity == "full" and kwargs.get(name) is None:
            fix = "recompute_granularity=full needs it: uniform (or block) and a number of layers"
            yield Problem(f"{section}transformer_config_kwargs.{name}", None, fix)
    if granularity not in (None, "full", "selective"):
        key = f"{section}transformer_config_kwargs.recompute_granularity"
        yield Problem(key, granularity, "must be full, selective or null")


def _no_adapter(cfg: SkyRLTrainConfig, role: str) -> Iterator[Problem]:
    rank = getattr(cfg.trainer, role).model.lora.rank
    if role == "ref" and rank:
        yield Problem("trainer.ref.model.lora.rank", rank, "the reference is never trained: leave it out")


def _fsdp(fsdp: FSDPConfig, section: str) -> Iterator[Problem]:
    for name, instead in _FSDP_INSTEAD.items():
        value = getattr(fsdp, name)
        if value != default_of(type(fsdp), name):
            yield Problem(f"{section}{name}", value, f"belongs to FSDP backends; here it is {instead}")


def _colocation(cfg: SkyRLTrainConfig) -> Iterator[Problem]:
    placement, engine, roles = cfg.trainer.placement, cfg.generator.inference_engine, active_roles(cfg)
    policy = role_world_size(placement, "policy")
    shared = {"ref": placement.colocate_policy_ref or placement.colocate_all, "critic": placement.colocate_all}
    for role, together in shared.items():
        if role not in roles or not together:
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
        elif placement.policy_num_gpus_per_node % engine_ranks(cfg):
            fix = (
                f"an engine takes tp · pp · dp = {engine_ranks(cfg)} GPUs of one node (colocate_all=true): must "
                f"divide policy_num_gpus_per_node={placement.policy_num_gpus_per_node}"
            )
            yield Problem("generator.inference_engine.tensor_parallel_size", engine.tensor_parallel_size, fix)


def gpus_asked(cfg: SkyRLTrainConfig) -> dict[str, int]:
    """Count the devices that each role takes for itself; roles that share another's are left out."""
    placement, roles = cfg.trainer.placement, active_roles(cfg)
    asked = {"policy": role_world_size(placement, "policy")}
    if placement.colocate_all:
        return asked
    if "ref" in roles and not placement.colocate_policy_ref:
        asked["ref"] = role_world_size(placement, "ref")
    if "critic" in roles:
        asked["critic"] = role_world_size(placement, "critic")
    engine = cfg.generator.inference_engine
    if engine.run_engines_locally:
        asked["engines"] = engine.num_engines * engine_ranks(cfg)
    return asked


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
