"""Attention to the keys that an indexer chooses (DeepSeek-V3.2), exact on any device: as a mask over all keys.

Megatron's (``transformer/experimental_attention_variant/dsa.py``) needs kernels for GPUs and trains the indexer with a
loss of its own. Here it chooses, and learns nothing: a choice has no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.runtime.model.attention import Choice, PackedAttention, PieceGroup
from skyrl_megatron.runtime.model.context_parallel import gather_tokens
from skyrl_megatron.runtime.model.rotary import PackedRotary, rotate

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    from bridges.family import IndexerSizes


class Indexer(torch.nn.Module):
    """Projections of the indexer, whole on every rank and frozen.

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
        self.requires_grad_(False)

    def forward(
        self, hidden: Tensor, compressed: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [p, heads, size], keys [p, size] and weights of the heads [p, heads] of tokens.

        ``hidden``: [p, H]; ``compressed``: queries before their up projection, [p, q_lora_rank]; ``table``: cosine
        and sine [p, 1, d].
        """
        queries = self.wq_b(compressed).unflatten(-1, (self.settings.heads, -1))
        keys = self.k_norm(self.wk(hidden)).unsqueeze(1)
        if self.settings.interleaved:  # the table is for halves; keys and queries may be reordered alike
            queries, keys = (_in_halves(x, table[0].shape[-1]) for x in (queries, keys))
        queries, keys = (rotate(x, table, interleaved=False) for x in (queries, keys))
        weights = self.weights_proj(hidden).float() * self.settings.heads**-0.5
        return queries.float() * self.settings.size**-0.5, keys[:, 0].float(), weights


class SelectedAttention(PackedAttention):
    """``PackedAttention`` in which each query sees the ``top_k`` keys of the highest scores."""

    requires_dsa_inputs = True  # Megatron then hands over hidden states and compressed queries
    rotary: PackedRotary
    """Of the attention that this is a part of."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.indexer = Indexer(config)

    @torch.no_grad()
    def choice(self, packed_seq_params: PackedSeqParams | None, **inputs: Any) -> Choice | None:
        """Score keys by hidden states ``x`` [s, b, H] and compressed queries ``qr`` [s, b, R], both a tp-th of the
        sequence with sequence parallelism. Sequences with no more tokens than a query may see need no choice."""
        x: Tensor = inputs["x"]
        hidden, compressed = self._whole(x), self._whole(inputs["qr"].view(*x.shape[:2], -1))
        length, batch = hidden.shape[:2]
        top_k = self.config.indexer.top_k
        hidden, compressed = (each.transpose(0, 1).flatten(0, 1) for each in (hidden, compressed))
        if packed_seq_params is None:
            if length <= top_k:
                return None
            positions = torch.arange(length, device=x.device).repeat(batch)
            queries, keys, weights = self.indexer(hidden, compressed, self.rotary.table(positions, length))
            queries, keys, weights = (each.unflatten(0, (batch, length)) for each in (queries, keys, weights))
            causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mask = _chosen(queries, keys, weights, causal, top_k)
            return lambda _: mask
        lengths: tuple[int, ...] = packed_seq_params.padded_lengths
        if max(lengths) <= top_k:
            return None
        table = self.rotary.table(packed_seq_params.positions, packed_seq_params.max_seqlen_q)
        queries, keys, weights = self.indexer(hidden, compressed, table)
        keys = gather_tokens(keys, lengths, self.groups.cp, shared_loss=False)

        def choose(group: PieceGroup | None) -> Tensor:
            assert group is not None
            n, q, k = group.shape
            mine = (each.index_select(0, group.query_index).unflatten(0, (n, q)) for each in (queries, weights))
            of_queries, of_heads = mine
            theirs = keys.index_select(0, group.key_index).unflatten(0, (n, k))
            if group.mask is not None:
                visible = group.mask[:, 0]
            else:
                visible = torch.ones(q, k, dtype=torch.bool, device=x.device).tril()
            with torch.no_grad():
                return _chosen(of_queries, theirs, of_heads, visible, top_k)

        return choose

    def _whole(self, x: Tensor) -> Tensor:
        """Gather [s / tp, b, …] → [s, b, …] where tp ranks share the sequence."""
        tp = self.groups.tp
        if not self.config.sequence_parallel or tp.size() == 1:
            return x
        whole = x.new_empty(tp.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=tp)
        return whole


def _in_halves(x: Tensor, width: int) -> Tensor:
    """Reorder the first ``width`` entries of the last dimension: those at even places, then those at odd ones."""
    return torch.cat([x[..., 0:width:2], x[..., 1:width:2], x[..., width:]], -1)


def _chosen(queries: Tensor, keys: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Return masks [n, 1, q, k] of the visible keys with the highest scores: Σ weight · relu(query · key) over heads.

    ``queries``: [n, q, heads, size]; ``keys``: [n, k, size]; ``weights``: [n, q, heads]; ``visible``: [n, q, k] or
    [q, k] bool.
    """
    scores = F.relu(torch.einsum("nqhd,nkd->nqhk", queries, keys))
    total = torch.einsum("nqh,nqhk->nqk", weights, scores).masked_fill(~visible, -torch.inf)
    best = total.topk(min(top_k, total.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(total, dtype=torch.bool).scatter(-1, best, True)
    return (chosen & visible).unsqueeze(1)
