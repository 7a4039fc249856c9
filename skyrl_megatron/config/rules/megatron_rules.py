"""Rules of Megatron's options and of the optimizer: what contradicts, and what this trainer does not support."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.roles import role_world_size
from skyrl_megatron.config.schema.algorithm import OPTIMIZER_DTYPES
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.models import MegatronConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


_AWARE, _ON_HOST, _SPREAD = "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_distributed_optimizer"
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_MASTERS = "main_params_dtype"


def optimizer_problems(
    options: Mapping[str, Any], section: str, hardware: Hardware, *, bf16: bool
) -> Iterator[Problem]:
    """Yield everything wrong with ``optimizer_config_kwargs``, of ``section``. ``bf16``: the weights are."""
    aware, on_host = options.get(_AWARE), options.get(_ON_HOST)
    spread = options.get(_SPREAD, True)
    if on_host and hardware.is_cpu:
        fix = "there is no GPU to keep the optimizer state away from: leave it out"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    elif on_host and spread and not bf16:
        fix = "Megatron cannot split float32 weights that it updates on the host: use trainer.bf16=true"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    if aware and not spread:
        fix = f"its state is split over data-parallel ranks: use {_SPREAD}=true, or leave this out"
        yield Problem(f"{section}{_AWARE}", aware, fix)
    for name, value in options.items():
        if not name.endswith("_dtype"):
            continue
        if wrong := _type_problem(name, value, aware=bool(aware), on_host=bool(on_host)):
            yield Problem(f"{section}{name}", value, wrong)


def _type_problem(name: str, value: object, *, aware: bool, on_host: bool) -> str | None:
    """Return what to do about a field that holds a type; None where it is right."""
    if not isinstance(value, str) or value not in OPTIMIZER_DTYPES:
        return f"is no type: use {', '.join(OPTIMIZER_DTYPES)}"
    if OPTIMIZER_DTYPES[value] == "float32":
        return None
    if name == "main_grads_dtype":
        return "gradients have the type that ddp_config.grad_reduce_in_fp32 gives them: leave it out"
    if name not in (*_MOMENTS, _MASTERS):
        return None
    if on_host:
        return f"is fp32 with {_ON_HOST}: leave one of them out"
    if not aware:
        return f"needs {_AWARE}=true"
    if name == _MASTERS and OPTIMIZER_DTYPES[value] != "float16":
        return "master weights are fp32 or fp16 in Transformer Engine's Adam: leave it out, or use fp16"
    return None


_BACKENDS = ("auto", "flash", "fused", "unfused")
_VARYING = "micro-batches are packed and vary in length: leave it out"
_OVERLAP = "takes Megatron's schedule of sub-layers, which policy-gradient losses do not run in: leave it out"
NOT_DRIVEN = {
    "fp8": "packed sequences are not padded to the sizes of FP8 products: leave it out, layers train in bf16",
    "fp4": "packed sequences are not padded to the sizes of FP4 products: leave it out, layers train in bf16",
    "fp8_param": "needs fp8 parameter gathering, which this trainer does not have: leave it out",
    "fp4_param": "needs fp4 parameter gathering, which this trainer does not have: leave it out",
    "tp_comm_overlap": "needs user buffers of one sequence length, and " + _VARYING,
    "overlap_moe_expert_parallel_comm": _OVERLAP,
    "delay_wgrad_compute": _OVERLAP,
    "overlap_dispatch_backward_with_experts_wgrad": _OVERLAP,
    "hierarchical_context_parallel_sizes": (
        "the process groups of a hierarchy are not made: leave it out and use context_parallel_size alone"
    ),
    "mtp_num_layers": (
        "multi-token-prediction layers are passed on as they are (`python -m bridges inspect` lists them as "
        "passthrough): leave it out, and set mtp.train=true to train them"
    ),
    "qk_clip": "needs a step after the optimizer's, which this trainer does not take: leave it out",
    "mla_down_proj_fusion": (
        "joins two weights that loading, syncs and checkpoints know by their own names: leave it out"
    ),
    "cache_mla_latents": "is for Megatron's own inference, and engines are vLLM's: leave it out",
    "enable_cuda_graph": _VARYING,
    "external_cuda_graph": _VARYING,
    "cuda_graph_impl": _VARYING,
}
"""Fields of Megatron's ``TransformerConfig`` that need more than a field → why, and what to do instead."""


def megatron_problems(
    cfg: SkyRLTrainConfig, role: str, section: str, hardware: Hardware, hf: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield everything wrong with a role's ``megatron_config``, its layout apart. ``section``: where it stands;
    ``hf``: the model's ``config.json``, {} where it is not at hand."""
    megatron: MegatronConfig = getattr(cfg.trainer, role).megatron_config
    if megatron.context_parallel_size > 1 and not cfg.trainer.use_sample_packing:
        fix = "needs trainer.use_sample_packing=true"
        yield Problem(f"{section}context_parallel_size", megatron.context_parallel_size, fix)
    if megatron.moe_enable_routing_replay and role not in ("policy", "ref"):
        fix = "the policy and its reference alone take the experts of the policy's engine: leave it out"
        yield Problem(f"{section}moe_enable_routing_replay", True, fix)
    if role == "ref" and megatron.moe_routing_replay_source == "trainer":
        fix = "the reference scores before the policy's routes are known: set rollout"
        yield Problem(f"{section}moe_routing_replay_source", "trainer", fix)
    yield from _experts(cfg, megatron, section, hardware)
    yield from _recompute(megatron, section)
    ddp = megatron.ddp_config
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        yield Problem(f"{section}ddp_config.overlap_param_gather", True, "needs overlap_grad_reduce=true")
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if hardware.is_cpu and getattr(ddp, name):
            yield Problem(f"{section}ddp_config.{name}", True, "needs GPUs: leave it out")
    for name, fix in NOT_DRIVEN.items():
        if (value := megatron.transformer_config_kwargs.get(name)) not in (None, False, 0, "none"):
            yield Problem(f"{section}transformer_config_kwargs.{name}", value, fix)
    if role != "ref":
        options, key = megatron.optimizer_config_kwargs, f"{section}optimizer_config_kwargs."
        yield from optimizer_problems(options, key, hardware, bf16=cfg.trainer.bf16)
    yield from _attention(cfg, megatron, section, hardware)
    yield from _rotary(megatron.transformer_config_kwargs, section, hardware, hf)
    yield from _indexer(megatron.transformer_config_kwargs, section, hf)
    if role == "policy" and megatron.mtp.train:
        yield from _draft(cfg, section)
    world = role_world_size(cfg.trainer.placement, role)
    outside = [rank for rank in megatron.torch_profiler_config.ranks if not 0 <= rank < world]
    if outside:
        fix = f"the {role} has ranks 0 to {world - 1}"
        yield Problem(f"{section}torch_profiler_config.ranks", outside, fix)


def _attention(cfg: SkyRLTrainConfig, megatron: MegatronConfig, section: str, hardware: Hardware) -> Iterator[Problem]:
    """Check that Transformer Engine has a kernel for the attention asked for
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, ``get_attention_backend``)."""
    key, cp = f"{section}transformer_config_kwargs.attention_backend", megatron.context_parallel_size
    backend = megatron.transformer_config_kwargs.get("attention_backend")
    if backend is not None and backend not in _BACKENDS:
        yield Problem(key, backend, f"must be one of {', '.join(_BACKENDS)}")
    if hardware.is_cpu:
        return
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        fix = "needs the package flash-attn, which is not installed: use auto or fused, which take cuDNN's kernels"
        yield Problem(key, backend, fix)
    if cp > 1 and backend == "unfused":
        yield Problem(key, backend, f"has no kernel for context_parallel_size={cp}: use auto, or 1 there")
    elif cp > 1 and backend is None and not cfg.trainer.flash_attn:
        fix = f"unfused attention has no kernel for {section}context_parallel_size={cp}: use true, or 1 there"
        yield Problem("trainer.flash_attn", False, fix)


def _rotary(kwargs: Mapping[str, Any], section: str, hardware: Hardware, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that a fused rotary kernel that is asked for rotates as the model does; left out, it is taken where one
    does (``runtime/model/build.py``)."""
    if not kwargs.get("apply_rope_fusion"):
        return
    rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    latent, yarn = bool(hf.get("kv_lora_rank")), "yarn" in (rope.get("rope_type"), rope.get("type"))
    reason = None
    if hardware.is_cpu:
        reason = "needs a GPU"
    elif latent and not yarn:
        reason = "multi-latent attention's fused kernel knows YaRN alone, and the model has none"
    elif yarn and not latent:
        reason = "the fused kernel leaves out the mscale of the model's YaRN"
    if reason:
        yield Problem(f"{section}transformer_config_kwargs.apply_rope_fusion", True, f"{reason}: leave it out")


def _indexer(kwargs: Mapping[str, Any], section: str, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the loss of an indexer (``runtime/model/family_attention.py``)."""
    if not (weight := kwargs.get("dsa_indexer_loss_coeff")):
        return
    key, reason = f"{section}transformer_config_kwargs.dsa_indexer_loss_coeff", None
    if hf and not hf.get("index_topk"):
        reason = "the model has no indexer: leave it out"
    elif not kwargs.get("dsa_indexer_use_sparse_loss"):
        reason = "is a loss over the chosen keys here: set dsa_indexer_use_sparse_loss=true beside it"
    if reason:
        yield Problem(key, weight, reason)


def _draft(cfg: SkyRLTrainConfig, section: str) -> Iterator[Problem]:
    """Check that the layer of multi-token prediction can be trained beside the rest (``runtime/model/mtp.py``)."""
    lora, replay, reason = cfg.trainer.policy.model.lora.rank, "moe_enable_routing_replay", None
    if lora:
        reason = f"trainer.policy.model.lora.rank={lora} trains adapters alone: leave it out"
    elif getattr(cfg.trainer.policy.megatron_config, replay):
        reason = f"engines record no experts of its router: leave it out, or {replay}"
    if reason:
        yield Problem(f"{section}mtp.train", True, reason)


def _experts(cfg: SkyRLTrainConfig, megatron: MegatronConfig, section: str, hardware: Hardware) -> Iterator[Problem]:
    """Check options of mixture-of-experts layers."""
    if megatron.moe_enable_routing_replay:
        of_engine = megatron.moe_routing_replay_source == "rollout"
        if of_engine and not cfg.generator.inference_engine.enable_return_routed_experts:
            fix = (
                "needs the engine's routes: set generator.inference_engine.enable_return_routed_experts=true, or "
                "moe_routing_replay_source=trainer"
            )
            yield Problem(f"{section}moe_enable_routing_replay", True, fix)
        if megatron.transformer_config_kwargs.get("moe_router_fusion"):
            fix = "the fused router cannot replay routes: set moe_enable_routing_replay=false, or leave this out"
            yield Problem(f"{section}transformer_config_kwargs.moe_router_fusion", True, fix)
    if megatron.moe_aux_loss_coeff and megatron.moe_router_load_balancing_type in ("none", "sinkhorn"):
        kind = megatron.moe_router_load_balancing_type
        fix = f"has no effect with moe_router_load_balancing_type={kind}: set aux_loss, or 0 here"
        yield Problem(f"{section}moe_aux_loss_coeff", megatron.moe_aux_loss_coeff, fix)
    dispatcher = megatron.moe_token_dispatcher_type
    key = f"{section}moe_token_dispatcher_type"
    if dispatcher == "allgather":  # Megatron refuses it with variable_seq_lengths (transformer_config.py)
        yield Problem(key, dispatcher, "needs micro-batches of one length, and packed ones vary: use alltoall")
    if dispatcher == "flex" and hardware.is_cpu:
        yield Problem(key, dispatcher, "needs GPUs: use alltoall")
    elif dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None:
        yield Problem(key, dispatcher, "needs DeepEP (the package deep_ep), which is not installed: use alltoall")


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
