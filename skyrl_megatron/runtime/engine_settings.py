"""Translate the configuration of a role into settings of Megatron's model and gradient buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from skyrl_megatron import device
from skyrl_megatron.config.hf_model import model_folder
from skyrl_megatron.config.roles import is_frozen, trains_draft
from skyrl_megatron.config.rules.exact_rules import uses_local_layers
from skyrl_megatron.config.rules.exchange_rules import HYBRID_EP, OVERLAP
from skyrl_megatron.config.schema.models import AUTO
from skyrl_megatron.runtime.model.description import HfModel, read_hf_model, with_rotary

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronConfig, SkyRLTrainConfig

FUSED_GRADIENTS = "gradient_accumulation_fusion"
_RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")


def hf_model(cfg: SkyRLTrainConfig, role: str) -> HfModel:
    """Read the model of a role and apply the run's changes to its ``config.json``."""
    settings, folder = getattr(cfg.trainer, role), model_folder(cfg, role)
    trust = cfg.trainer.trust_remote_code
    changes = {**settings.model_config_kwargs, **settings.megatron_config.model_config_kwargs}
    if cfg.trainer.rope_scaling or cfg.trainer.rope_theta is not None:
        plain = read_hf_model(folder, changes=changes, trust_remote_code=trust)
        changes |= with_rotary(plain.config, cfg.trainer.rope_scaling, cfg.trainer.rope_theta)
    return read_hf_model(folder, changes=changes, trust_remote_code=trust, draft=trains_draft(cfg, role))


def parameter_dtype(cfg: SkyRLTrainConfig) -> torch.dtype:
    """Return bfloat16 if ``trainer.bf16`` is set and there is a GPU, else float32."""
    return torch.bfloat16 if cfg.trainer.bf16 and device.has_cuda() else torch.float32


def transformer_kwargs(cfg: SkyRLTrainConfig, role: str) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the run sets; ``transformer_config_kwargs`` is applied last.

    ``trainer.gradient_checkpointing=false`` removes all recompute fields. Selective recomputation removes the fields
    of full recomputation, because Megatron rejects the combination. ``gradient_accumulation_fusion`` is removed: it
    would need apex in Megatron's own linear layers, and ``optimizer.fuse_gradients`` sets it in those that have it.
    """
    megatron: MegatronConfig = getattr(cfg.trainer, role).megatron_config
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
        "moe_router_load_balancing_type": megatron.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": megatron.moe_aux_loss_coeff,
        "moe_z_loss_coeff": megatron.moe_z_loss_coeff,
        "moe_grouped_gemm": megatron.moe_grouped_gemm,
        "attention_backend": "auto" if cfg.trainer.flash_attn else "unfused",
        "deterministic_mode": bool(cfg.trainer.deterministic) and device.has_cuda(),
    }
    optional = {
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_router_score_function": megatron.moe_router_score_function,
        "moe_router_enable_expert_bias": megatron.moe_router_enable_expert_bias,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    if role == "policy" and cfg.trainer.exact_rollouts and device.has_cuda() and not uses_local_layers(megatron):
        fields |= {"batch_invariant_mode": True, "attention_backend": "flash", "flash_attention_version": 3}
    fields |= megatron.transformer_config_kwargs
    for name in (FUSED_GRADIENTS, "bf16", "fp16"):  # the dtype of the weights is known to the rank alone
        fields.pop(name, None)
    if not cfg.trainer.gradient_checkpointing or is_frozen(role):
        fields = {name: value for name, value in fields.items() if name not in _RECOMPUTE}
    elif fields.get("recompute_granularity") == "selective":
        fields |= {"recompute_method": None, "recompute_num_layers": None}
    elif fields.get("recompute_granularity") == AUTO:  # no preflight check has chosen
        every = (None, None, None) if fields.get(OVERLAP) else ("full", "uniform", 1)
        fields |= dict(zip(("recompute_granularity", "recompute_method", "recompute_num_layers"), every, strict=True))
    if fields.get("moe_flex_dispatcher_backend") == HYBRID_EP:  # micro-batches of the ranks differ in length
        fields.setdefault("moe_hybridep_pad_uneven_dispatch_inputs", True)
    return fields


def ddp_config(megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """Return Megatron's gradient-buffer settings.

    The optimizer is distributed over dp unless ``optimizer_config_kwargs.use_distributed_optimizer=false``. Gradients
    are summed (``loss_scale.py``), so ``average_in_collective`` is always false.
    """
    distributed = bool(megatron.optimizer_config_kwargs.get("use_distributed_optimizer", True))
    buffers = megatron.ddp_config
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=buffers.grad_reduce_in_fp32,
        overlap_grad_reduce=buffers.overlap_grad_reduce,
        overlap_param_gather=buffers.overlap_param_gather,
        use_distributed_optimizer=distributed,
        # Objectives divide by the step's totals themselves, which is exact for replicas with unequal rows.
        average_in_collective=False,
    )
