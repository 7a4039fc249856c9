"""Rules of the exchange of tokens between experts: dispatchers, its overlap with other micro-batches, and moves of
experts between ranks.

From the source of Megatron-Core 0.19.2 (``transformer/moe/token_dispatcher.py``, ``transformer_config.py``,
``models/gpt/fine_grained_callables.py``) and DeepEP (``deep_ep/buffer.py``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.config.schema.models import AUTO
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.models import MegatronConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig

OVERLAP = "overlap_moe_expert_parallel_comm"
DEEP_EP, HYBRID_EP = "deepep", "hybridep"
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Sizes of a group of experts (ep · etp) that DeepEP has settings for."""
NODE = 8
"""GPUs of a node that DeepEP connects by NVLink; more nodes need all of them."""


def exchange_problems(
    cfg: SkyRLTrainConfig, role: str, megatron: MegatronConfig, section: str, hardware: Hardware
) -> Iterator[Problem]:
    """Yield every problem of a role's dispatcher and of ``overlap_moe_expert_parallel_comm``."""
    dispatcher, key = megatron.moe_token_dispatcher_type, f"{section}moe_token_dispatcher_type"
    if dispatcher == "allgather":  # Megatron rejects it with variable_seq_lengths (transformer_config.py)
        fix = "needs micro-batches of one length, but packed micro-batches vary in length: use alltoall"
        yield Problem(key, dispatcher, fix)
    if dispatcher == "flex":
        yield from _flex(megatron, key, section, hardware)
    if megatron.moe_expert_moves != "none" and not is_frozen(role):
        if reason := _against_moves(cfg, role, megatron, section):
            yield Problem(f"{section}moe_expert_moves", megatron.moe_expert_moves, f"{reason}, or set it to none")
    if megatron.transformer_config_kwargs.get(OVERLAP):
        reason = _against_overlap(cfg, role, megatron, section, hardware)
        if reason is not None:
            yield Problem(f"{section}transformer_config_kwargs.{OVERLAP}", True, f"{reason}, or remove this key")


def _flex(megatron: MegatronConfig, key: str, section: str, hardware: Hardware) -> Iterator[Problem]:
    if hardware.is_cpu:
        yield Problem(key, "flex", "needs GPUs: use alltoall")
        return
    name = "moe_flex_dispatcher_backend"
    backend = megatron.transformer_config_kwargs.get(name, DEEP_EP)
    if backend not in (DEEP_EP, HYBRID_EP):
        fix = f"others need micro-batches of one length: set it to {DEEP_EP} or {HYBRID_EP}"
        yield Problem(f"{section}transformer_config_kwargs.{name}", backend, fix)
        return
    if not hardware.elsewhere and not _has_package(backend):
        package = "deep_ep (DeepEP)" if backend == DEEP_EP else "deep_ep of DeepEP's branch hybrid-ep"
        yield Problem(key, "flex", f"needs the package {package}, which is not installed: use alltoall")
    ranks = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or 1)
    if ranks == 1:
        yield Problem(key, "flex", f"needs {section}expert_model_parallel_size above 1: set it, or use alltoall")
    elif backend == DEEP_EP and ranks not in DEEP_EP_RANKS:
        fix = f"DeepEP has no settings for {ranks} ranks (ep · etp), only for {', '.join(map(str, DEEP_EP_RANKS))}"
        yield Problem(key, "flex", f"{fix}: change {section}expert_model_parallel_size, or use alltoall")
    elif ranks > NODE and hardware.gpus_per_node != NODE:
        fix = f"over several nodes DeepEP needs {NODE} GPUs of each, and a node has {hardware.gpus_per_node}"
        yield Problem(key, "flex", f"{fix}: use alltoall")
    if megatron.moe_router_dtype != "fp32":
        fix = "moe_token_dispatcher_type=flex sends probabilities in fp32: set it to fp32"
        yield Problem(f"{section}moe_router_dtype", megatron.moe_router_dtype, fix)


def _has_package(backend: str) -> bool:
    package = importlib.util.find_spec("deep_ep")
    if package is None or backend == DEEP_EP:
        return package is not None
    return any((Path(folder) / "hybrid_ep_buffer.py").exists() for folder in package.submodule_search_locations or ())


def _against_moves(cfg: SkyRLTrainConfig, role: str, megatron: MegatronConfig, section: str) -> str | None:
    """Return what to change so that a role's experts can move between ranks; None if they can."""
    settings, options = getattr(cfg.trainer, role), megatron.optimizer_config_kwargs
    if megatron.expert_model_parallel_size == 1:
        return f"needs experts on several ranks: set {section}expert_model_parallel_size"
    if role == "policy" and cfg.trainer.exact_rollouts:
        return "changes the order in which a token's experts are summed: set trainer.exact_rollouts=false"
    if settings.optimizer_config.optimizer != "adam":
        return "moves the moments of Adam only: set optimizer_config.optimizer=adam"
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if options.get(name):
            return f"moves masters and moments in fp32 between GPUs: remove optimizer_config_kwargs.{name}"
    if megatron.moe_token_dispatcher_type != "alltoall":
        return f"is verified with one dispatcher: set {section}moe_token_dispatcher_type=alltoall"
    if megatron.transformer_config_kwargs.get(OVERLAP):
        return f"is not verified with {OVERLAP}: remove that key"
    return None


def _against_overlap(
    cfg: SkyRLTrainConfig, role: str, megatron: MegatronConfig, section: str, hardware: Hardware
) -> str | None:
    """Return what to change so that a role's expert exchange can overlap with the other pass of another micro-batch;
    None if it can."""
    kwargs = megatron.transformer_config_kwargs
    granularity = kwargs.get("recompute_granularity") if cfg.trainer.gradient_checkpointing else None
    if hardware.is_cpu:
        return "needs GPUs"
    if not cfg.trainer.bf16:
        return "needs 16 bits: set trainer.bf16=true"
    if megatron.expert_model_parallel_size == 1:
        return f"needs experts on several ranks: set {section}expert_model_parallel_size"
    if megatron.pipeline_model_parallel_size > 1 and (megatron.virtual_pipeline_model_parallel_size or 1) == 1:
        return f"needs the interleaved schedule: set {section}virtual_pipeline_model_parallel_size"
    if granularity not in (None, AUTO, "selective"):
        return f"needs the layers' activations: set {section}transformer_config_kwargs.recompute_granularity=auto"
    if granularity == "selective" and "moe" in (kwargs.get("recompute_modules") or ()):
        return f"needs the experts' activations: remove moe from {section}transformer_config_kwargs.recompute_modules"
    if kwargs.get("moe_shared_expert_overlap"):
        return f"excludes {section}transformer_config_kwargs.moe_shared_expert_overlap: remove one of the two keys"
    if role == "policy" and megatron.mtp.train:
        return f"skips the hooks of a draft head: set {section}mtp.train=false"
    if megatron.moe_enable_routing_replay:
        return f"skips the hooks that replay experts: set {section}moe_enable_routing_replay=false"
    name = "moe_router_load_balancing_type"
    if "seq_aux_loss" in (kwargs.get(name) or getattr(megatron, name)):
        return f"skips the hooks that tell routers the sequences: set {section}{name}=aux_loss"
    if role == "policy" and cfg.trainer.policy.model.lora.rank:
        return "is for training all weights: set trainer.policy.model.lora.rank=0"
    return None
