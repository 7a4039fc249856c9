"""Rules of Megatron's options and of the optimizer: contradictions, and options that this trainer does not support."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.roles import is_frozen, role_world_size
from skyrl_megatron.config.rules.exchange_rules import OVERLAP, exchange_problems
from skyrl_megatron.config.rules.passthrough import megatron_key_problems
from skyrl_megatron.config.schema.algorithm import OPTIMIZER_DTYPES
from skyrl_megatron.config.schema.models import AUTO, DEFAULT_TRANSFORMER_CONFIG_KWARGS
from skyrl_megatron.errors import Problem

if TYPE_CHECKING:
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.schema.models import MegatronConfig
    from skyrl_megatron.config.schema.run import SkyRLTrainConfig


MEASURE = "log_max_attention_logit"
NEEDS_PACKING = "needs packed sequences: set trainer.use_sample_packing=true"
_AWARE, _ON_HOST, _DISTRIBUTED = "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_distributed_optimizer"
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_MASTERS = "main_params_dtype"


def optimizer_problems(
    options: Mapping[str, Any], section: str, hardware: Hardware, *, bf16: bool, muon: bool = False
) -> Iterator[Problem]:
    """Yield every problem of ``optimizer_config_kwargs`` in ``section``. ``bf16``: whether the weights are
    bfloat16. ``muon``: whether Muon trains them."""
    aware, on_host = options.get(_AWARE), options.get(_ON_HOST)
    distributed = options.get(_DISTRIBUTED, True)
    if on_host and hardware.is_cpu:
        fix = "without a GPU the optimizer state is on the host already: remove this key"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    elif on_host and distributed and not bf16:
        fix = "Megatron cannot shard float32 weights that it updates on the host: set trainer.bf16=true"
        yield Problem(f"{section}{_ON_HOST}", on_host, fix)
    if aware and not distributed:
        fix = f"this optimizer shards its state over data-parallel ranks: set {_DISTRIBUTED}=true, or remove this key"
        yield Problem(f"{section}{_AWARE}", aware, fix)
    rate, least = options.get("decoupled_lr"), options.get("decoupled_min_lr")
    if isinstance(least, int | float) and not (isinstance(rate, int | float) and rate >= least):
        yield Problem(
            f"{section}decoupled_min_lr",
            least,
            "is the lower limit of decoupled_lr: set decoupled_lr to at least this",
        )
    for name, value in options.items():
        if not name.endswith("_dtype"):
            continue
        if wrong := _type_problem(name, value, aware=bool(aware), on_host=bool(on_host), muon=muon):
            yield Problem(f"{section}{name}", value, wrong)


def _type_problem(name: str, value: object, *, aware: bool, on_host: bool, muon: bool) -> str | None:
    """Return the fix for a field that names a dtype; None if the field is valid."""
    if not isinstance(value, str) or value not in OPTIMIZER_DTYPES:
        return f"unknown dtype: use one of {', '.join(OPTIMIZER_DTYPES)}"
    if OPTIMIZER_DTYPES[value] == "float32":
        return None
    if name == "main_grads_dtype":
        return "ddp_config.grad_reduce_in_fp32 sets the dtype of gradients: remove this key"
    if name not in (*_MOMENTS, _MASTERS):
        return None
    if muon:
        return "master weights and moments are fp32 with optimizer=muon: remove this key"
    if on_host:
        return f"must be fp32 with {_ON_HOST}: remove one of the two keys"
    if not aware:
        return f"needs {_AWARE}=true: set it"
    if name == _MASTERS and OPTIMIZER_DTYPES[value] != "float16":
        return "Transformer Engine's Adam takes master weights in fp32 or fp16: remove this key, or use fp16"
    return None


_BACKENDS = ("auto", "flash", "fused", "unfused")


def megatron_problems(
    cfg: SkyRLTrainConfig, role: str, section: str, hardware: Hardware, hf: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield every problem of a role's ``megatron_config``, except those of its layout. ``section``: its key prefix;
    ``hf``: the model's ``config.json``, {} if it is not available."""
    megatron: MegatronConfig = getattr(cfg.trainer, role).megatron_config
    if megatron.context_parallel_size > 1 and not cfg.trainer.use_sample_packing:
        yield Problem(f"{section}context_parallel_size", megatron.context_parallel_size, NEEDS_PACKING)
    if megatron.moe_enable_routing_replay and role not in ("policy", "ref"):
        fix = "only the policy and the reference can replay the experts of the policy's engine: remove this key"
        yield Problem(f"{section}moe_enable_routing_replay", True, fix)
    if role == "ref" and megatron.moe_routing_replay_source == "trainer":
        fix = "the reference computes log-probs before the policy has chosen experts: set it to rollout"
        yield Problem(f"{section}moe_routing_replay_source", "trainer", fix)
    yield from _experts(cfg, megatron, section)
    yield from exchange_problems(cfg, role, megatron, section, hardware)
    yield from _recompute(megatron, section)
    ddp = megatron.ddp_config
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        fix = "needs ddp_config.overlap_grad_reduce=true: set it"
        yield Problem(f"{section}ddp_config.overlap_param_gather", True, fix)
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if hardware.is_cpu and getattr(ddp, name):
            yield Problem(f"{section}ddp_config.{name}", True, "needs GPUs: remove this key")
    yield from megatron_key_problems(cfg, role)
    optimizer = None if is_frozen(role) else getattr(cfg.trainer, role).optimizer_config.optimizer
    options, key = megatron.optimizer_config_kwargs, f"{section}optimizer_config_kwargs."
    if not is_frozen(role):
        yield from optimizer_problems(options, key, hardware, bf16=cfg.trainer.bf16, muon=optimizer == "muon")
    yield from _clipping(cfg, role, megatron, section)
    yield from _attention(cfg, megatron, section, hardware)
    yield from _rotary(megatron.transformer_config_kwargs, section, hardware, hf)
    for name in ("moe_permute_fusion", "moe_router_fusion"):
        if hardware.is_cpu and megatron.transformer_config_kwargs.get(name):
            yield Problem(f"{section}transformer_config_kwargs.{name}", True, "needs GPUs: remove this key")
    yield from _indexer(megatron.transformer_config_kwargs, section, hf)
    if role == "policy" and megatron.mtp.train:
        yield from _draft(cfg, section)
    if role == "policy" and cfg.trainer.share_prefixes == "always":
        for reason in unshared_prefixes(cfg, role):
            yield Problem("trainer.share_prefixes", "always", f"{reason}; or set it to auto or never")
    world = role_world_size(cfg.trainer.placement, role)
    outside = [rank for rank in megatron.torch_profiler_config.ranks if not 0 <= rank < world]
    if outside:
        fix = f"the {role} has ranks 0 to {world - 1}: choose from these"
        yield Problem(f"{section}torch_profiler_config.ranks", outside, fix)


def unshared_prefixes(cfg: SkyRLTrainConfig, role: str) -> list[str]:
    """Return the settings with which a role cannot compute tokens once that rows share, and what to do."""
    section = f"trainer.{role}.megatron_config."
    megatron, trainer = getattr(cfg.trainer, role).megatron_config, cfg.trainer
    options = megatron.transformer_config_kwargs
    dropout = [name for name in ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps") if options.get(name)]
    of_one_row = trainer.micro_train_batch_size_per_gpu == trainer.micro_forward_batch_size_per_gpu == 1
    wrong = {
        "the engine computes each row by itself: set trainer.exact_rollouts=false": trainer.exact_rollouts,
        NEEDS_PACKING: not trainer.use_sample_packing,
        f"skips the hooks of routers: remove {section}transformer_config_kwargs.{OVERLAP}": options.get(OVERLAP),
        f"dropout differs by row: remove {section}transformer_config_kwargs.{next(iter(dropout), '')}": dropout,
        f"the kernel takes no depth in a tree: remove {section}transformer_config_kwargs.apply_rope_fusion": (
            options.get("apply_rope_fusion")
        ),
        "dropout differs by row: set trainer.policy.model.lora.dropout=0": (
            role == "policy" and trainer.policy.model.lora.dropout
        ),
        "a micro-batch has one row: set trainer.max_tokens_per_microbatch": (
            trainer.max_tokens_per_microbatch <= 0 and of_one_row
        ),
        f"{section}moe_balance_experts deals trees by their tokens: set trainer.max_tokens_per_microbatch": (
            megatron.moe_balance_experts and trainer.max_tokens_per_microbatch <= 0
        ),
    }
    return [fix for fix, holds in wrong.items() if holds]


UNMEASURED = "what that gains on a GPU was not measured yet: set trainer.share_prefixes=always"
"""Why ``auto`` shares nothing on a GPU."""


def replaces_attention(cfg: SkyRLTrainConfig, role: str) -> bool:
    """Return whether a role's layers have this package's attention, whatever they are, because it shares prefixes."""
    return cfg.trainer.share_prefixes == "always" and not unshared_prefixes(cfg, role)


def _clipping(cfg: SkyRLTrainConfig, role: str, megatron: MegatronConfig, section: str) -> Iterator[Problem]:
    """Check the settings of QK-clip, and of measuring the largest logit without it (``qk_clip.py``)."""
    options, key = megatron.transformer_config_kwargs, f"{section}transformer_config_kwargs.qk_clip"
    if options.get(MEASURE):
        measured = f"{section}transformer_config_kwargs.{MEASURE}"
        if is_frozen(role):
            yield Problem(measured, True, "logits are measured in training, and this role is not trained: remove it")
        elif not cfg.trainer.use_sample_packing:
            yield Problem(measured, True, NEEDS_PACKING)
    if not options.get("qk_clip"):
        return
    settings = getattr(cfg.trainer, role)
    if is_frozen(role) or (role == "policy" and settings.model.lora.rank > 0):
        yield Problem(key, True, "clips trained weights of queries and keys, which this role does not have: remove it")
    elif settings.optimizer_config.optimizer != "muon":
        yield Problem(key, True, f"belongs to Muon: set trainer.{role}.optimizer_config.optimizer=muon, or remove it")
    if not cfg.trainer.use_sample_packing:
        yield Problem(key, True, NEEDS_PACKING)
    for name, most in (("qk_clip_alpha", 1.0), ("qk_clip_threshold", float("inf"))):
        value = options.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < most):
            yield Problem(f"{section}transformer_config_kwargs.{name}", value, f"must be above 0 and below {most}")


def _attention(cfg: SkyRLTrainConfig, megatron: MegatronConfig, section: str, hardware: Hardware) -> Iterator[Problem]:
    """Check that Transformer Engine has a kernel for the chosen attention
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, ``get_attention_backend``)."""
    key, cp = f"{section}transformer_config_kwargs.attention_backend", megatron.context_parallel_size
    backend = megatron.transformer_config_kwargs.get("attention_backend")
    if backend is not None and backend not in _BACKENDS:
        yield Problem(key, backend, f"must be one of {', '.join(_BACKENDS)}")
    if hardware.is_cpu:
        return
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        fix = "needs the package flash-attn, which is not installed: use auto or fused, which use cuDNN's kernels"
        yield Problem(key, backend, fix)
    if cp > 1 and backend == "unfused":
        fix = f"unfused attention does not support context_parallel_size={cp}: use auto, or set that to 1"
        yield Problem(key, backend, fix)
    elif cp > 1 and backend is None and not cfg.trainer.flash_attn:
        fix = (
            f"unfused attention does not support {section}context_parallel_size={cp}: set trainer.flash_attn=true, or "
            "set that to 1"
        )
        yield Problem("trainer.flash_attn", False, fix)


def _rotary(kwargs: Mapping[str, Any], section: str, hardware: Hardware, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that the fused rotary kernel computes what the model needs, if it is set. If it is not set,
    ``runtime/model/build.py`` decides."""
    if not kwargs.get("apply_rope_fusion"):
        return
    rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    latent, yarn = bool(hf.get("kv_lora_rank")), "yarn" in (rope.get("rope_type"), rope.get("type"))
    reason = None
    if hardware.is_cpu:
        reason = "needs a GPU"
    elif latent and not yarn:
        reason = "the fused kernel of multi-latent attention supports only YaRN, which this model does not use"
    elif yarn and not latent:
        reason = "the fused kernel ignores the mscale of the model's YaRN"
    if reason:
        yield Problem(f"{section}transformer_config_kwargs.apply_rope_fusion", True, f"{reason}: remove this key")


def _indexer(kwargs: Mapping[str, Any], section: str, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the loss of an indexer (``runtime/model/family_attention.py``)."""
    if not (weight := kwargs.get("dsa_indexer_loss_coeff")):
        return
    key, reason = f"{section}transformer_config_kwargs.dsa_indexer_loss_coeff", None
    if hf and not hf.get("index_topk"):
        reason = "the model has no indexer: remove this key"
    elif not kwargs.get("dsa_indexer_use_sparse_loss"):
        reason = "this trainer computes the indexer loss over the selected keys: set dsa_indexer_use_sparse_loss=true"
    if reason:
        yield Problem(key, weight, reason)


def _draft(cfg: SkyRLTrainConfig, section: str) -> Iterator[Problem]:
    """Check that the multi-token-prediction layer can be trained with the policy (``runtime/model/mtp.py``)."""
    lora, replay, reason = cfg.trainer.policy.model.lora.rank, "moe_enable_routing_replay", None
    if lora:
        reason = f"trainer.policy.model.lora.rank={lora} trains only adapters: remove one of the two keys"
    elif getattr(cfg.trainer.policy.megatron_config, replay):
        reason = f"engines do not record the experts of this layer's router: remove this key, or set {replay}=false"
    if reason:
        yield Problem(f"{section}mtp.train", True, reason)


def _experts(cfg: SkyRLTrainConfig, megatron: MegatronConfig, section: str) -> Iterator[Problem]:
    """Check options of mixture-of-experts layers."""
    if megatron.moe_enable_routing_replay:
        of_engine = megatron.moe_routing_replay_source == "rollout"
        if of_engine and not cfg.generator.inference_engine.enable_return_routed_experts:
            fix = (
                "needs the experts that the engine chose: set "
                "generator.inference_engine.enable_return_routed_experts=true, or moe_routing_replay_source=trainer"
            )
            yield Problem(f"{section}moe_enable_routing_replay", True, fix)
        if megatron.transformer_config_kwargs.get("moe_router_fusion"):
            fix = "the fused router cannot replay experts: set moe_enable_routing_replay=false, or remove this key"
            yield Problem(f"{section}transformer_config_kwargs.moe_router_fusion", True, fix)
    if megatron.moe_aux_loss_coeff and megatron.moe_router_load_balancing_type in ("none", "sinkhorn"):
        kind = megatron.moe_router_load_balancing_type
        fix = f"has no effect with moe_router_load_balancing_type={kind}: set that to aux_loss, or this to 0"
        yield Problem(f"{section}moe_aux_loss_coeff", megatron.moe_aux_loss_coeff, fix)


def _recompute(megatron: MegatronConfig, section: str) -> Iterator[Problem]:
    """Check that ``recompute_method`` and ``recompute_num_layers`` are set exactly with full recomputation
    (transformer_config.py)."""
    kwargs = megatron.transformer_config_kwargs
    granularity = kwargs.get("recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers"):
        chosen = granularity == AUTO and kwargs.get(name) not in (None, DEFAULT_TRANSFORMER_CONFIG_KWARGS[name])
        if chosen or (granularity == "selective" and kwargs.get(name) is not None):
            fix = "needs recompute_granularity=full: set that, or remove this key"
            yield Problem(f"{section}transformer_config_kwargs.{name}", kwargs[name], fix)
        if granularity == "full" and kwargs.get(name) is None:
            fix = (
                "recompute_granularity=full needs recompute_method (uniform, block) and recompute_num_layers: set both"
            )
            yield Problem(f"{section}transformer_config_kwargs.{name}", None, fix)
    if granularity not in (None, "full", "selective", AUTO):
        key = f"{section}transformer_config_kwargs.recompute_granularity"
        yield Problem(key, granularity, f"must be {AUTO}, full, selective or null")
