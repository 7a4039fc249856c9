"""Attention of MiMo-V2-Flash: layers with a sliding window differ in KV groups, rotary base and sinks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from skyrl_megatron.runtime.model.rotary import PackedRotary

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    from bridges.family import VaryingHeads


class HeadsByLayer(SelfAttention):
    """Megatron's, with a configuration of the layer's own, and with values of another size than keys.

    ``config.heads_by_layer``: what differs, a :class:`bridges.family.VaryingHeads`.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, **options: Any
    ) -> None:
        heads: VaryingHeads = config.heads_by_layer
        self.windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        own = copy.copy(config)
        if self.windowed:
            own.num_query_groups, own.softmax_type = heads.window_groups, "learnable"
        super().__init__(own, submodules, layer_number, **options)
        self.heads, self.rotary = heads, None
        if self.windowed:
            self.rotary = PackedRotary(
                RotaryEmbedding(
                    config.kv_channels,
                    heads.rotary_percent,
                    rotary_base=heads.window_rotary_base,
                    use_cpu_initialization=config.use_cpu_initialization,
                    cp_group=self.pg_collection.cp,
                )
            )
        groups, width, count = own.num_query_groups, own.kv_channels, own.num_attention_heads
        linear: dict[str, Any] = dict(config=own, bias=False, is_expert=False, tp_group=self.pg_collection.tp)
        self.linear_qkv = submodules.linear_qkv(
            own.hidden_size,
            count * width + groups * (width + heads.value_size),
            init_method=own.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.linear_proj = submodules.linear_proj(
            count * heads.value_size,
            own.hidden_size,
            init_method=own.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project [s, b, hidden] → queries [s, b, heads, key size], keys, and values [s, b, groups, value size]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // groups
        mixed = mixed.unflatten(-1, (groups, -1))
        query, key, value = mixed.split([queries * width, width, self.heads.value_size], -1)
        return query.reshape(*query.shape[:2], -1, width), key, value * self.heads.value_scale

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as Megatron's, positions rotated by the layer's own base."""
        if self.rotary is not None and packed_seq_params is None:
            length = hidden_states.shape[0] * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
            rotary_pos_emb = self.rotary(length)
        elif self.rotary is not None:
            packed_seq_params = self.rotary.again(packed_seq_params)
        out: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )
        return out
