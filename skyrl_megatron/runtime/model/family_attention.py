"""Attention variants of single families.

They are heads that differ by layer (MiMo-V2-Flash), multi-latent attention (DeepSeek-V2, arXiv:2405.04434), and sparse
attention with an indexer (DeepSeek-V3.2). Megatron's sparse attention
(``transformer/experimental_attention_variant/dsa.py``) needs GPU kernels. The selection of keys has no gradient. The
indexer is frozen unless ``dsa_indexer_loss_coeff`` adds a loss that trains it to predict the attention weights.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.runtime.model.attention import (
    ChunkGroup,
    KeySelection,
    KeySelector,
    PackedAttention,
    gather_tokens,
    segments_of,
)
from skyrl_megatron.runtime.model.rotary import PackedRotary, rotate

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    from bridges.family import IndexerSizes, VaryingHeads


class HeadsByLayer(SelfAttention):
    """Megatron's self-attention with a configuration per layer, and with different sizes of keys and values.

    ``config.heads_by_layer``: a :class:`bridges.family.VaryingHeads`.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, **options: Any
    ) -> None:
        heads: VaryingHeads = config.heads_by_layer
        self.windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # a copy: the configuration is shared by all layers
        layer_config = copy.copy(config)
        if self.windowed:
            layer_config.num_query_groups, layer_config.softmax_type = heads.window_groups, "learnable"
        super().__init__(layer_config, submodules, layer_number, **options)
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
        groups, width, count = (
            layer_config.num_query_groups,
            layer_config.kv_channels,
            layer_config.num_attention_heads,
        )
        linear: dict[str, Any] = dict(config=layer_config, bias=False, is_expert=False, tp_group=self.pg_collection.tp)
        # Megatron's own projections assume that keys and values have one size, and are replaced
        self.linear_qkv = submodules.linear_qkv(
            layer_config.hidden_size,
            count * width + groups * (width + heads.value_size),
            init_method=layer_config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.linear_proj = submodules.linear_proj(
            count * heads.value_size,
            layer_config.hidden_size,
            init_method=layer_config.output_layer_init_method,
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
        """Attend as Megatron does, with the layer's own rotary base: [s, b, hidden] → (same shape, bias)."""
        # with sequence parallelism a rank sees a tp-th of the positions
        if self.rotary is not None and packed_seq_params is None:
            length = hidden_states.shape[0] * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
            rotary_pos_emb = self.rotary(length)
        elif self.rotary is not None:
            packed_seq_params = self.rotary.with_table(packed_seq_params)
        out: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )
        return out


class Indexer(torch.nn.Module):
    """Projections of the indexer. They are replicated on all ranks, and frozen without ``dsa_indexer_loss_coeff``.

    ``config.indexer``: a :class:`bridges.family.IndexerSizes`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        settings: IndexerSizes = config.indexer
        self.settings = settings

        def linear(columns: int, rows: int) -> torch.nn.Linear:
            return torch.nn.Linear(columns, rows, bias=False, dtype=config.params_dtype)

        self.wq_b = linear(config.q_lora_rank, settings.heads * settings.size)
        self.wk = linear(config.hidden_size, settings.size)
        self.k_norm = torch.nn.LayerNorm(settings.size, eps=1e-6, dtype=config.params_dtype)
        self.weights_proj = linear(config.hidden_size, settings.heads)
        self.requires_grad_(bool(config.dsa_indexer_loss_coeff))

    def forward(
        self, hidden: Tensor, compressed: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [p, heads, size], keys [p, size] and head weights [p, heads] of p tokens.

        ``hidden``: [p, H]; ``compressed``: queries before the up projection, [p, q_lora_rank]; ``table``: cosine and
        sine [p, 1, d].
        """
        queries = self.wq_b(compressed).unflatten(-1, (self.settings.heads, -1))
        keys = self.k_norm(self.wk(hidden)).unsqueeze(1)
        if self.settings.interleaved:  # the table is for halves; reordering keys and queries alike keeps the scores
            queries, keys = (_in_halves(x, table[0].shape[-1]) for x in (queries, keys))
        queries, keys = (rotate(x, table, interleaved=False) for x in (queries, keys))
        weights = self.weights_proj(hidden).float() * self.settings.heads**-0.5
        return queries.float() * self.settings.size**-0.5, keys[:, 0].float(), weights


class SelectedAttention(PackedAttention):
    """``PackedAttention`` in which each query attends to the ``top_k`` keys with the highest indexer scores."""

    requires_dsa_inputs = True  # makes Megatron pass hidden states and compressed queries
    rotary: PackedRotary
    """The rotary embedding of the enclosing attention module."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.indexer = Indexer(config)
        self.divergence: Tensor | None = None
        """[2] float64 since it was last taken: sum of divergences, number of queries."""

    @property
    def _learns(self) -> bool:
        return bool(self.config.dsa_indexer_loss_coeff) and self.training and torch.is_grad_enabled()

    def key_selector(self, packed_seq_params: PackedSeqParams | None, **inputs: Any) -> KeySelector | None:
        """Return a selector of keys by the indexer's scores, or None if all keys are selected.

        The inputs are hidden states ``x`` [s, b, H] and compressed queries ``qr`` [s, b, R]; with sequence parallelism
        both have a tp-th of the sequence. All keys are selected if no sequence has more than ``top_k`` tokens; an
        indexer in training still needs its scores.
        """
        learns, top_k = self._learns, self.config.indexer.top_k
        # detached: the indexer must not train the layers below it
        x: Tensor = inputs["x"].detach()
        hidden, compressed = self._whole(x), self._whole(inputs["qr"].detach().view(*x.shape[:2], -1))
        length, batch = hidden.shape[:2]
        # tokens first, in the order of the pack
        hidden, compressed = (x_.transpose(0, 1).flatten(0, 1) for x_ in (hidden, compressed))
        if packed_seq_params is None:
            if length <= top_k and not learns:
                return None
            positions = torch.arange(length, device=x.device).repeat(batch)
            with torch.set_grad_enabled(learns):
                queries, keys, weights = self.indexer(hidden, compressed, self.rotary.table(positions, length))
                queries, keys, weights = (x_.unflatten(0, (batch, length)) for x_ in (queries, keys, weights))
                scores = _scores(queries, keys, weights)
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mask = _top_k_mask(scores.detach(), causal, top_k)
            # scores are kept only for the loss: [n, q, k] for every layer otherwise
            selection = KeySelection(mask)
            if learns:
                selection = KeySelection(mask, scores, torch.ones(scores.shape[:2], device=x.device))
            return lambda _: selection
        lengths: tuple[int, ...] = packed_seq_params.padded_lengths
        if packed_seq_params.max_seqlen_kv <= top_k and not learns:
            return None
        table = self.rotary.table(packed_seq_params.positions, packed_seq_params.max_seqlen_kv)
        with torch.set_grad_enabled(learns):
            queries, keys, weights = self.indexer(hidden, compressed, table)
            keys = gather_tokens(keys, lengths, self.groups.cp, shared_loss=False)
        # padding has no loss
        real = (~packed_seq_params.padding).float()

        def choose(group: ChunkGroup | None) -> KeySelection:
            assert group is not None
            n, q, k = group.shape
            with torch.set_grad_enabled(learns):
                group_queries, group_weights = (
                    x_.index_select(0, group.query_index).unflatten(0, (n, q)) for x_ in (queries, weights)
                )
                group_keys = keys.index_select(0, group.key_index).unflatten(0, (n, k))
                scores = _scores(group_queries, group_keys, group_weights)
            if group.mask is not None:
                visible = group.mask[:, 0]
            else:
                visible = torch.ones(q, k, dtype=torch.bool, device=x.device).tril()
            # selected without gradient: top-k has none, and the indexer learns through its loss alone
            mask = _top_k_mask(scores.detach(), visible, top_k)
            if not learns:
                return KeySelection(mask)
            counted = torch.zeros(n * q, device=x.device)
            counted[group.kept] = real[group.query_index[group.kept]]
            return KeySelection(mask, scores, counted.view(n, q))

        return choose

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | KeySelection | None) -> Tensor:
        out = super()._attend(query, key, value, mask)
        if not isinstance(mask, KeySelection) or mask.scores is None:
            return out
        # attached to the output, so that every schedule and recomputation runs its backward pass with the
        # layer's
        loss = self.config.dsa_indexer_loss_coeff * self._divergence(query, key, mask)
        result: Tensor = _AttachLoss.apply(out, loss * self.config.moe_grad_scale_func())  # type: ignore[no-untyped-call]
        return result

    def _divergence(self, query: Tensor, key: Tensor, selection: KeySelection) -> Tensor:
        """Return the KL divergence of the indexer, Σ p log(p / q) over selected keys, summed over real queries.

        p is the attention averaged over heads, q the softmax of the indexer's scores (DeepSeek-V3.2, section 2.1,
        sparse training stage).
        """
        assert selection.scores is not None and selection.counted is not None
        with torch.no_grad():
            logits = query.float() @ key.float().transpose(-1, -2) * self.scale
            attention = logits.masked_fill(~selection.mask, -torch.inf).softmax(-1).sum(1)
            if self.groups.tp.size() > 1:
                # heads are split over tp, and the target is the mean over all of them
                dist.all_reduce(attention, group=self.groups.tp)
            attention /= self.config.num_attention_heads
        seen = selection.mask[:, 0]
        logs = selection.scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
        # xlogy: 0 · log 0 is 0 for keys that are not attended to
        divergence = (torch.xlogy(attention, attention) - attention * logs).sum(-1) * selection.counted
        totals = torch.stack([divergence.detach().sum(), selection.counted.sum()]).double()
        self.divergence = totals if self.divergence is None else self.divergence + totals
        return divergence.sum()

    def _whole(self, x: Tensor) -> Tensor:
        """Gather [s / tp, b, …] → [s, b, …] under sequence parallelism."""
        tp = self.groups.tp
        if not self.config.sequence_parallel or tp.size() == 1:
            return x
        whole = x.new_empty(tp.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=tp)
        return whole


def _in_halves(x: Tensor, width: int) -> Tensor:
    """Reorder the first ``width`` entries of the last dimension: even indices first, then odd indices."""
    return torch.cat([x[..., 0:width:2], x[..., 1:width:2], x[..., width:]], -1)


def _scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return Σ weight · relu(query · key) over heads, [n, q, k]. ``queries``: [n, q, heads, size]; ``keys``:
    [n, k, size]; ``weights``: [n, q, heads]."""
    products = F.relu(torch.einsum("nqhd,nkd->nqhk", queries, keys))
    return torch.einsum("nqh,nqhk->nqk", weights, products)


def _top_k_mask(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Return the mask [n, 1, q, k] of the ``top_k`` visible keys with the highest ``scores`` [n, q, k].

    ``visible``: [n, q, k] or [q, k] bool.
    """
    total = scores.masked_fill(~visible, -torch.inf)
    best = total.topk(min(top_k, total.shape[-1]), dim=-1).indices
    # topk also picks hidden keys where fewer than k are visible; the mask below drops them
    mask = torch.zeros_like(total, dtype=torch.bool).scatter(-1, best, True)
    return (mask & visible).unsqueeze(1)


class _AttachLoss(torch.autograd.Function):
    """Returns the attention output unchanged and backpropagates an auxiliary loss with it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.loss)


class DepthRotary(torch.nn.Module):
    """Rotary table of multi-latent attention. With shared prefixes it has a row for each token of the pack.

    ``stock``: Megatron's ``RotaryEmbedding`` or ``YarnRotaryEmbedding``.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock
        self._positions: Tensor | None = None

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, config: Any, params: Any = None
    ) -> int:
        """Return the length of the table. Megatron's attention calls this before :meth:`forward`, which has no access
        to the pack."""
        self._positions = None
        if segments_of(params) is not None:
            self._positions = params.positions
            longest: int = params.max_seqlen_kv
            return longest
        length: int = self.stock.get_rotary_seq_len(inference_context, transformer, transformer_input, config, params)
        return length

    def get_cached_cos_sin(self, *arguments: Any, **options: Any) -> Any:
        """Return the tables of Megatron's fused kernels, which shared prefixes do not use."""
        return self.stock.get_cached_cos_sin(*arguments, **options)

    def forward(self, length: int, packed_seq: bool = False, **options: Any) -> Any:
        """Return angles [length, 1, 1, d], with shared prefixes [p, 1, d], and of Yarn also its scale."""
        made = self.stock(length, packed_seq=packed_seq, **options)
        if self._positions is None:
            return made
        angles, *scale = made if isinstance(made, tuple) else (made,)
        angles = angles[:, 0].index_select(0, self._positions)
        return (angles, *scale) if scale else angles


class SegmentedLatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention, whose packs may be of segments. Its core attention must be ours."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.core_attention, SelectedAttention):
            self.core_attention.rotary = PackedRotary(self.rotary_pos_emb)
        self.rotary_pos_emb: Any = DepthRotary(self.rotary_pos_emb)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Project [s, b, H] as Megatron does; with shared prefixes tokens are rotated by their place in a row."""
        if segments_of(packed_seq_params) is not None:
            # without boundaries Megatron applies the table as it is, instead of from each boundary on
            packed_seq_params = copy.copy(packed_seq_params)
            for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
                setattr(packed_seq_params, name, None)
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, *arguments, **options
        )


class LatentAttention(SegmentedLatentAttention):
    """Multi-latent attention with separate norms before the up projections and correct gradients under tp.

    Megatron's local spec rejects models without compressed queries, because it expects a matrix with a fused norm.
    With tp > 1 its column-parallel down projection gives each rank all rotary keys but only the gradient of the rank's
    own heads: logits are correct, gradients are not. Here the gathered result is scattered to the sequence-parallel
    region, and Megatron's own gather from there sums the gradients.
    """

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
