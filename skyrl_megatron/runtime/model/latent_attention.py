"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434) without Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from skyrl_megatron.runtime.model.rotary import PackedRotary
from skyrl_megatron.runtime.model.selected_attention import SelectedAttention


class LatentAttention(MLASelfAttention):
    """Megatron's, with separate norms before the up projections and with correct gradients under tp.

    Megatron's local spec refuses models without a compressed query, because it looks for a matrix that holds the norm.
    With tp > 1 its column-split down projection gives each rank all rotary keys but only the gradient of the rank's
    own heads (logits are right, gradients are not). Here the gathered result goes back to the sequence-parallel
    region, from where Megatron gathers it in a way that sums the gradients.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.core_attention, SelectedAttention):
            self.core_attention.rotary = PackedRotary(self.rotary_pos_emb)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": ColumnParallelLinear,
            "linear_q_up_proj": ColumnParallelLinear,
            "linear_kv_up_proj": ColumnParallelLinear,
            "q_layernorm": submodules.q_layernorm,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.config.tensor_model_parallel_size > 1:
            kv_combined = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(kv_combined))
        return q_compressed, kv_combined
