"""What a transformer layer is made of where Transformer Engine is not: Megatron's modules, our norm, core attention
and experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from skyrl_megatron.runtime.attention import PackedAttention
from skyrl_megatron.runtime.experts import GroupedExperts
from skyrl_megatron.runtime.norm import RMSNorm
from skyrl_megatron.runtime.router import TokenWeightedRouter

# Checkpoint keys are those of Transformer Engine, whose matrices hold the norm before them.
_CHECKPOINT_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_DENSE_CHECKPOINT_KEYS = _CHECKPOINT_KEYS | {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def block_spec(config: TransformerConfig, moe: tuple[bool, ...], layers: range) -> TransformerBlockSubmodules:
    """The layers of one model chunk. ``moe``: for each layer of the model, whether it holds experts."""
    specs = {flag: layer_spec(config, flag) for flag in {moe[layer] for layer in layers}}
    return TransformerBlockSubmodules(layer_specs=[specs[moe[layer]] for layer in layers], layer_norm=RMSNorm)


def layer_spec(config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One layer with grouped-query attention and a dense or expert MLP."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts(config) if moe else _dense(),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_CHECKPOINT_KEYS if moe else _DENSE_CHECKPOINT_KEYS,
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _dense() -> Any:
    return partial(MLP.as_mlp_submodule, submodules=_linears())


def _experts(config: TransformerConfig) -> Any:
    grouped = GroupedExperts if config.moe_grouped_gemm else LocalSpecProvider().grouped_mlp_modules(False)
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=grouped,
            shared_experts=partial(SharedExpertMLP, submodules=_linears()),
            router=TokenWeightedRouter,
        ),
    )
