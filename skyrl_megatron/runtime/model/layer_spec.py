"""The layer spec without Transformer Engine: Megatron's modules with our norm, core attention, router and experts."""

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
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bridges.family import MegatronModelConfig
from bridges.rows import DELTA_NET
from bridges.tensor_names import fused_norms
from skyrl_megatron.plugins import FAMILY_LAYERS
from skyrl_megatron.runtime.model.attention import PackedAttention
from skyrl_megatron.runtime.model.description import HfModel
from skyrl_megatron.runtime.model.moe import GroupedExperts, router_class
from skyrl_megatron.runtime.model.norm import FullWidthNorm, RMSNorm
from skyrl_megatron.runtime.parallel_state import ProcessGroups

HEADS_BY_LAYER, INDEXER, LATENT = "heads_by_layer", "indexer", "multi_latent_attention"
SEGMENTED_LATENT = "segmented_latent_attention"
_FOLDER = "skyrl_megatron.runtime.model"
FAMILY_LAYERS.register_path(DELTA_NET, f"{_FOLDER}.delta_net:GatedDeltaNet")
FAMILY_LAYERS.register_path(HEADS_BY_LAYER, f"{_FOLDER}.family_attention:HeadsByLayer")
FAMILY_LAYERS.register_path(INDEXER, f"{_FOLDER}.family_attention:SelectedAttention")
FAMILY_LAYERS.register_path(LATENT, f"{_FOLDER}.family_attention:LatentAttention")
FAMILY_LAYERS.register_path(SEGMENTED_LATENT, f"{_FOLDER}.family_attention:SegmentedLatentAttention")


def block_spec(
    config: TransformerConfig, model: HfModel, layers: range, groups: ProcessGroups
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one model chunk."""
    kinds = model.plan.shape.kinds
    specs = {kind: layer_spec(config, model.megatron, *kind, groups) for kind in {kinds[layer] for layer in layers}}
    return TransformerBlockSubmodules(layer_specs=[specs[kinds[layer]] for layer in layers], layer_norm=RMSNorm)


def layer_spec(
    config: TransformerConfig, model: MegatronModelConfig, moe: bool, kind: str, groups: ProcessGroups
) -> ModuleSpec:
    """Return the spec of one layer. ``moe``: expert or dense MLP. ``kind``: an entry of ``ModelShape.mixers``."""
    latent = model.multi_latent_attention
    delta_net = kind == DELTA_NET
    if delta_net:
        mixer = ModuleSpec(module=FAMILY_LAYERS.require(DELTA_NET))
    else:
        mixer = _latent_attention(model) if latent else _grouped_query_attention(config, model, groups)
        if HEADS_BY_LAYER in model.attributes:
            # the projections are those of grouped-query attention, the sizes are made in the module
            mixer.module = FAMILY_LAYERS.require(HEADS_BY_LAYER)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts(config, model) if moe else _dense(),
            mlp_bda=get_bias_dropout_add,
            # checkpoints name norms as Transformer Engine's layers do, which fuse them into the next matrix
            sharded_state_dict_keys_map=fused_norms(mla=latent, moe=moe, delta_net=delta_net),  # keys of TE
        ),
    )


def _grouped_query_attention(
    config: TransformerConfig, model: MegatronModelConfig, groups: ProcessGroups
) -> ModuleSpec:
    q_norm = k_norm = RMSNorm if config.qk_layernorm else IdentityOp
    if model.full_width_qk_norm:
        q_norm = partial(FullWidthNorm, heads=config.num_attention_heads, groups=groups)
        k_norm = partial(FullWidthNorm, heads=config.num_query_groups, groups=groups)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def _latent_attention(model: MegatronModelConfig) -> ModuleSpec:
    def norm(config: TransformerConfig, hidden_size: int, eps: float) -> RMSNorm:
        return RMSNorm(config, hidden_size, eps if model.mla_norm_epsilon is None else model.mla_norm_epsilon)

    return ModuleSpec(
        module=FAMILY_LAYERS.require(LATENT),
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=FAMILY_LAYERS.require(INDEXER) if INDEXER in model.attributes else PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _dense() -> Any:
    return partial(MLP.as_mlp_submodule, submodules=_linears())


def _experts(config: TransformerConfig, model: MegatronModelConfig) -> Any:
    grouped = GroupedExperts if config.moe_grouped_gemm else LocalSpecProvider().grouped_mlp_modules(False)
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=grouped,
            shared_experts=partial(SharedExpertMLP, submodules=_linears()),
            router=router_class(model),
        ),
    )
