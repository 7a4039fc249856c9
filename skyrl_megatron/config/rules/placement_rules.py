"""Rules of layouts and devices: parallel degrees of each role, numbers of GPUs, and shared GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.fields import default_of, get_path
from skyrl_megatron.config.hf_model import model_dimensions
from skyrl_megatron.config.layout import ParallelConfig, layout_problems
from skyrl_megatron.config.roles import (
    active_roles,
    engine_ranks,
    is_frozen,
    role_configs,
    role_layout,
    role_world_size,
    shares_policy_gpus,
)
from skyrl_megatron.config.rules.megatron_rules import megatron_problems
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.models import FSDPConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_FSDP_INSTEAD = {
    "cpu_offload": "megatron_config.optimizer_config_kwargs.optimizer_cpu_offload=true",
    "reshard_after_forward": "megatron_config.tensor_model_parallel_size or expert_model_parallel_size",
    "fsdp_size": "megatron_config.tensor_model_parallel_size and the other parallel degrees",
    "mixed_precision": "trainer.bf16 and megatron_config.ddp_config.grad_reduce_in_fp32",
    "wrap_policy": "megatron_config.transformer_config_kwargs",
}


def placement_problems(
    cfg: SkyRLTrainConfig, hardware: Hardware, configs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield every problem of layouts and devices. ``configs``: role → ``config.json``, for those available."""
    policy = (role_layout(cfg, "policy"), cfg.trainer.policy.megatron_config, configs.get("policy"))
    for role in active_roles(cfg):
        section = f"trainer.{role}.megatron_config."
        layout, megatron, hf = role_layout(cfg, role), getattr(cfg.trainer, role).megatron_config, configs.get(role)
        if role == "policy" or (layout, megatron, hf) != policy:  # one report for roles with the same layout
            yield from _layout(layout, hf or {}, section)
            yield from megatron_problems(cfg, role, section, hardware, hf or {})
        yield from _no_adapter(cfg, role)
        yield from _fsdp(getattr(cfg.trainer, role).fsdp_config, f"trainer.{role}.fsdp_config.")
    yield from device_problems(cfg, hardware)


def device_problems(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Yield every problem of the numbers of devices, and of who shares them."""
    yield from _colocation(cfg, hardware)
    if hardware.is_cpu:
        yield from _cpu_engines(cfg)
    else:
        yield from _gpus(cfg, hardware)
        yield from _engine_nodes(cfg, hardware)


def _layout(parallel: ParallelConfig, hf: Mapping[str, Any], section: str) -> Iterator[Problem]:
    yield from layout_problems(parallel, model_dimensions(hf), section)
    if parallel.etp > 1 and hf.get("model_type") == "gpt_oss":
        fix = "experts with biases cannot be split: set it to 1"
        yield Problem(f"{section}expert_tensor_parallel_size", parallel.etp, fix)


def _no_adapter(cfg: SkyRLTrainConfig, role: str) -> Iterator[Problem]:
    rank = getattr(cfg.trainer, role).model.lora.rank
    if is_frozen(role) and rank:
        named = {"ref": "the reference", "teacher": "a teacher"}[role]
        yield Problem(f"trainer.{role}.model.lora.rank", rank, f"{named} is never trained: remove this key")
    if role == "critic" and rank:
        yield Problem("trainer.critic.model.lora.rank", rank, "a critic trains all of its weights: remove this key")


def _fsdp(fsdp: FSDPConfig, section: str) -> Iterator[Problem]:
    for name, instead in _FSDP_INSTEAD.items():
        value = getattr(fsdp, name)
        if value != default_of(type(fsdp), name):
            yield Problem(f"{section}{name}", value, f"is a key of FSDP backends; here use {instead}")


def _colocation(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    placement, engine, roles = cfg.trainer.placement, cfg.generator.inference_engine, active_roles(cfg)
    policy = role_world_size(placement, "policy")
    for role in roles[1:]:
        if not shares_policy_gpus(cfg, role):
            continue
        switch = "colocate_all" if placement.colocate_all else "colocate_policy_ref"
        for name in ("num_nodes", "num_gpus_per_node"):
            size, needed = getattr(placement, f"{role}_{name}"), getattr(placement, f"policy_{name}")
            if size != needed:
                fix = f"the {role} shares the policy's GPUs ({switch}=true): set it to policy_{name}={needed}"
                yield Problem(f"trainer.placement.{role}_{name}", size, fix)
    if placement.colocate_all and engine.run_engines_locally:
        one, per_node = engine_ranks(cfg), placement.policy_num_gpus_per_node
        executor, tp = engine.distributed_executor_backend, engine.tensor_parallel_size
        if one > hardware.gpus_per_node > 0 and executor != "ray":
            pass  # reported with the executor
        elif policy % one or _straddle(one, per_node, executor):
            rest = one // tp
            fits = [n for n in range(1, tp) if not (policy % (n * rest) or _straddle(n * rest, per_node, executor))]
            fix = (
                f"an engine takes tp · pp · dp = {one} GPUs; with colocate_all=true this must divide the policy's "
                f"{policy}, and divide policy_num_gpus_per_node={per_node}, or be a multiple of it with "
                f"distributed_executor_backend=ray: set it to {fits[-1] if fits else 1}"
            )
            yield Problem("generator.inference_engine.tensor_parallel_size", tp, fix)
        elif engine.num_engines * one != policy:
            fix = (
                f"engines of tp · pp · dp = {one} take {engine.num_engines * one} GPUs, but share the policy's "
                f"{policy} (colocate_all=true): set it to {policy // one}, or remove this key"
            )
            yield Problem("generator.inference_engine.num_engines", engine.num_engines, fix)


def _straddle(ranks: int, per_node: int, executor: str) -> bool:
    """Return whether an engine would share a node's GPUs with part of another engine, or its executor cannot use
    several nodes."""
    return bool(per_node % ranks and ranks % per_node) or (ranks > per_node and executor != "ray")


def gpus_requested(cfg: SkyRLTrainConfig) -> dict[str, int]:
    """Count the devices that each role reserves. A role that shares the devices of another is left out."""
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
    """Yield layouts with which vLLM's CPU engines start but crash at their first request."""
    engine = cfg.generator.inference_engine
    if not engine.run_engines_locally or engine.backend != "vllm":
        return
    for name in ("data", "expert"):
        if (size := getattr(engine, f"{name}_parallel_size")) > 1:
            fix = "vLLM's CPU engines crash at their first request with this: set it to 1, or run on GPUs"
            yield Problem(f"generator.inference_engine.{name}_parallel_size", size, fix)


def _gpus(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    placement, asked, most = cfg.trainer.placement, gpus_requested(cfg), hardware.gpus_per_node
    total, there = sum(asked.values()), sum(hardware.node_gpus)
    large = {role: count for role in asked if (count := getattr(placement, f"{role}_num_gpus_per_node", 0)) > most}
    for role, per_node in large.items():
        now = getattr(placement, f"{role}_num_nodes")
        nodes = min(math.ceil(per_node * now / most), hardware.nodes)
        fix = f"a node has {most} GPUs: set it to {most}"
        fix += f" and trainer.placement.{role}_num_nodes={nodes}" if nodes != now else ""
        yield Problem(f"trainer.placement.{role}_num_gpus_per_node", per_node, fix)
    if there and total > there and not large:
        listed = " + ".join(f"{count} ({role})" for role, count in asked.items())
        key, fits = _smaller(cfg, asked, there)
        instead = f"set it to {fits}" if fits else "use fewer, or share them (trainer.placement.colocate_all=true)"
        fix = f"the run takes {listed} = {total} GPUs, but there are {there}: {instead}"
        yield Problem(key, get_path(cfg, key), f"{fix}, or join a larger Ray cluster (RAY_ADDRESS)")
    few = [count for count in hardware.uneven if count < placement.policy_num_gpus_per_node]
    enough = len(hardware.uneven) - len(few)
    if few and total <= there and placement.policy_num_nodes > enough:
        per_node, counts = placement.policy_num_gpus_per_node, ", ".join(map(str, hardware.uneven))
        fix = f"nodes have {counts} GPUs, so {enough} have {per_node}: set it to {enough}, or "
        fix += f"trainer.placement.policy_num_gpus_per_node={min(few)}"
        yield Problem("trainer.placement.policy_num_nodes", placement.policy_num_nodes, fix)


def _smaller(cfg: SkyRLTrainConfig, asked: Mapping[str, int], there: int) -> tuple[str, int | None]:
    """Return a key of a run that takes more than the ``there`` GPUs, and its value that fits; None: no value does."""
    placement = cfg.trainer.placement
    left = (there - sum(asked.values()) + asked.get("engines", 0)) // engine_ranks(cfg)
    if "engines" in asked and left >= 1:
        return "generator.inference_engine.num_engines", left
    room = there - sum(asked.values()) + asked["policy"]
    if room >= placement.policy_num_gpus_per_node:
        return "trainer.placement.policy_num_nodes", room // placement.policy_num_gpus_per_node
    return "trainer.placement.policy_num_gpus_per_node", max(room, 0) // placement.policy_num_nodes or None


def idle_gpus(cfg: SkyRLTrainConfig, nodes: Sequence[int]) -> str | None:
    """Return how many GPUs the run does not use, with the keys that use them; None if it uses all. ``nodes``: GPUs of
    each node."""
    placement, engine, asked = cfg.trainer.placement, cfg.generator.inference_engine, gpus_requested(cfg)
    total, used = sum(nodes), sum(asked.values())
    if used >= total:
        return None
    keys = {}
    if more := (total - used) // engine_ranks(cfg) if "engines" in asked else 0:
        keys["generator.inference_engine.num_engines"] = engine.num_engines + more
    elif "engines" not in asked:
        sizes = {"policy_num_nodes": len(nodes), "policy_num_gpus_per_node": min(nodes)}
        keys |= {f"trainer.placement.{key}": size for key, size in sizes.items() if size != getattr(placement, key)}
    using = " ".join(f"{key}={value}" for key, value in keys.items())
    return f"{total - used} of {total} GPUs stay idle" + (f": {using} uses them" if using else "")


def missing_gpus(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Yield a problem if the user asks for kernels of GPUs and the machine shows none. Recipes for GPUs do so."""
    if hardware.is_cpu and cfg.trainer.flash_attn and cfg.trainer.is_set("flash_attn"):
        wanted, nodes = sum(gpus_requested(cfg).values()), cfg.trainer.placement.policy_num_nodes
        where = "the cluster" if hardware.elsewhere else "this machine"
        fix = (
            f"needs GPUs: no GPU is visible on {where}; this configuration wants {wanted}: start it where nvidia-smi "
            f"lists them (a login node has none: submit a job), check it here with "
            f"--check={nodes}x{max(wanted // nodes, 1)}, or remove this key for a run on the CPU"
        )
        yield Problem("trainer.flash_attn", True, fix)


def _engine_nodes(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[Problem]:
    """Check engines with more GPUs than a node has: only Ray starts workers on another node, and a vLLM engine over
    several nodes has one data-parallel rank."""
    engine, ranks, per_node = cfg.generator.inference_engine, engine_ranks(cfg), hardware.gpus_per_node
    if not engine.run_engines_locally:
        return
    executor = engine.distributed_executor_backend
    if executor == "uni" and ranks > 1:
        fix = (
            f"runs one rank, but an engine has tp · pp · dp = {ranks} ranks: set it to mp, or to ray for several nodes"
        )
        yield Problem("generator.inference_engine.distributed_executor_backend", executor, fix)
    elif ranks > per_node and executor != "ray":
        fix = f"an engine of tp · pp · dp = {ranks} GPUs spans several nodes of {per_node}: set it to ray"
        yield Problem("generator.inference_engine.distributed_executor_backend", executor, fix)
    if ranks > per_node and engine.data_parallel_size > 1:
        fix = f"an engine spans several nodes of {per_node} GPUs: set it to 1 and increase num_engines instead"
        yield Problem("generator.inference_engine.data_parallel_size", engine.data_parallel_size, fix)
