"""Megatron's ``TransformerConfig`` for a model in a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional as F

from bridges.family import MegatronModelConfig
from skyrl_megatron.config.rules.layout import PREFIX, ParallelConfig
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.hf.model import HfModel
from skyrl_megatron.runtime.loss_scale import SUMMED_GRADIENTS

_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}


def transformer_config(
    model: HfModel,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    use_te: bool = False,
    on_meta: bool = False,
    prefix: str = PREFIX,
) -> TransformerConfig:
    """Make the ``TransformerConfig`` (``MLATransformerConfig`` for multi-latent attention) of a model in a layout.

    ``overrides`` (``transformer_config_kwargs``) are its fields, applied last; keys that start with ``rope_`` or
    belong to the layout are refused, because they have settings of their own. Raises ConfigError for an unknown or
    refused field, and with Megatron's own message when it rejects the combination.
    """
    overrides = dict(overrides or {})
    cls = MLATransformerConfig if model.megatron.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(cls)}
    layout = _layout_fields(parallel)
    key = f"{prefix}transformer_config_kwargs"
    problems = [
        Problem(f"{key}.{name}", value, f"megatron's {cls.__name__} has no such field")
        for name, value in overrides.items()
        if name not in known
    ]
    problems += [
        Problem(f"{key}.{name}", value, f"the layout decides it ({layout[name]}); set {prefix}* instead")
        for name, value in overrides.items()
        if name in layout and value != layout[name]
    ]
    biased = model.layout_shape.num_experts and model.megatron.transformer.get("add_bias_linear")
    if biased and parallel.etp > 1:
        fix = "experts with biases are not split: set it to 1 and raise expert_model_parallel_size instead"
        problems.append(Problem(f"{prefix}expert_tensor_parallel_size", parallel.etp, fix))
    name, own = "moe_router_enable_expert_bias", model.megatron.transformer.get("moe_router_enable_expert_bias", False)
    if bool(overrides.get(name, own)) != own:
        fix = f"the model has {'a' if own else 'no'} bias for each expert: leave it out"
        problems.append(Problem(f"{prefix}{name}", overrides[name], fix))
    if problems:
        raise ConfigError(problems)
    if isinstance(backend := overrides.get("attention_backend"), str):
        overrides["attention_backend"] = AttnBackend[backend]
    fields = {
        **_common_fields(dtype, use_te, on_meta),
        "apply_rope_fusion": use_te and _has_fused_rotary(model.megatron),
        **model.megatron.transformer,
        "activation_func": _ACTIVATIONS[model.megatron.activation],
        **layout,
        **overrides,
    }
    try:
        config = cls(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError([Problem(key, overrides, f"Megatron rejects it: {error}")]) from error
    for name, value in model.megatron.attributes.items():
        setattr(config, name, value)
    return config


def _has_fused_rotary(megatron: MegatronModelConfig) -> bool:
    """Tell whether there is a fused kernel that rotates as the model does. That of multi-latent attention knows YaRN
    alone (transformer_config.py refuses another); Transformer Engine's for packed sequences leaves out YaRN's
    ``mscale`` (models/common/embeddings/rope_utils.py), and where pairs are neighbours it asks for the version of
    Transformer Engine, which was not tried."""
    if megatron.multi_latent_attention:
        return bool(megatron.transformer["rope_type"] == "yarn")
    neighbours = megatron.transformer.get("rotary_interleaved", False)
    return not neighbours and bool(megatron.model.get("position_embedding_type") != "yarn")


def _layout_fields(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "sequence_parallel": parallel.sequence_parallel,
        # Batched sends between two interleaved stages are matched in the wrong order: gradients come out wrong.
        "overlap_p2p_comm": parallel.uses_overlapped_p2p,
        "batch_p2p_comm": not parallel.uses_overlapped_p2p,
    }


def _common_fields(dtype: torch.dtype, use_te: bool, on_meta: bool) -> dict[str, Any]:
    """Return fields that do not depend on the model: precision, varying shapes, fused kernels where they exist."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "transformer_impl": "transformer_engine" if use_te else "local",
        "bias_activation_fusion": use_te,
        "bias_dropout_fusion": use_te,
        "masked_softmax_fusion": use_te,
        "persist_layer_norm": use_te,
        "moe_permute_fusion": use_te,
        "gradient_accumulation_fusion": False,
        **SUMMED_GRADIENTS,
        # Weights come from a checkpoint; on_meta, modules make them where torch.device("meta") says.
        "perform_initialization": False,
        "use_cpu_initialization": on_meta and not use_te,
        "init_model_with_meta_device": on_meta,
        "attention_backend": AttnBackend.auto,
    }
