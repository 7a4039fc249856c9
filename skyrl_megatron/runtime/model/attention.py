"""Core attention without Transformer Engine: SDPA over packed sequences, with zig-zag context parallelism.

Each sequence (padded to a multiple of 2·cp) is split into 2·cp chunks. Rank r holds chunks r and 2·cp − 1 − r, so that
causal attention costs the same on every rank. The local tensor of a rank holds, for each sequence, its first and then
its second chunk, as Megatron's rotary embedding for packed sequences expects (models/common/embeddings/rope_utils.py).

Megatron's ``DotProductAttention`` supports neither packed sequences nor context parallelism. Here sequences of similar
length (with context parallelism: the two chunks of each) are padded and run in one SDPA call. This is exact, because
causal queries never see the padding after them. Keys and values are gathered over cp. The plan of a pack is cached by
its lengths.

On a GPU in half precision a flash kernel takes sequences of any length. With shared prefixes (``data/prefixes.py``)
the sequences of a pack are segments, whose queries also see the keys of the segments before them, without their
padding. A kernel computes a piece of that, and ``joined_attention.py`` joins the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.runtime.model.joined_attention import BatchedPiece, FlashPiece, JoinedAttention
from skyrl_megatron.runtime.model.rotary import rotate

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


@lru_cache(maxsize=64)
def local_positions(padded_lengths: tuple[int, ...], cp: int, rank: int) -> Tensor:
    """Return the positions of the tokens of ``rank``, in local order, in the packed global order: [P / cp] int64."""
    if cp == 1:
        return torch.arange(sum(padded_lengths))
    pieces, start = [], 0
    for length in padded_lengths:
        chunk = length // (2 * cp)
        # one chunk of the first half and its mirror image: both together attend to as many pairs on every rank
        for index in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


@lru_cache(maxsize=64)
def global_order(padded_lengths: tuple[int, ...], cp: int) -> Tensor:
    """Return the index of each token of the packed global order in the concatenated tokens of all ranks: [P] int64."""
    held = torch.cat([local_positions(padded_lengths, cp, rank) for rank in range(cp)])
    order = torch.empty_like(held)
    order[held] = torch.arange(len(held))
    return order


class _GatherTokens(torch.autograd.Function):
    """Gathers the tokens of all ranks in global order.

    ``shared_loss``: every rank computes the same loss from the gathered tensor, so all gradients are equal and a rank
    takes its own slice. Otherwise (keys and values, used by different queries on each rank) gradients are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup, shared_loss: bool
    ) -> Tensor:
        ctx.padded_lengths, ctx.group, ctx.shared_loss = padded_lengths, group, shared_loss
        local = local.contiguous()
        gathered = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local, group=group)
        # ranks hold their chunks in zig-zag order; keys have to stand in the order of the sequence
        return gathered[global_order(padded_lengths, group.size()).to(local.device)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        # each rank's queries used all keys, so each has a part of their gradient
        if not ctx.shared_loss:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        mine = local_positions(ctx.padded_lengths, ctx.group.size(), ctx.group.rank())
        return grad[mine.to(grad.device)], None, None, None


def gather_tokens(
    local: Tensor, padded_lengths: tuple[int, ...], group: dist.ProcessGroup, *, shared_loss: bool
) -> Tensor:
    """Gather [P / cp, …] of each rank to [P, …] in the packed global order, on every rank; differentiable."""
    if group.size() == 1:
        return local
    gathered: Tensor = _GatherTokens.apply(local, padded_lengths, group, shared_loss)  # type: ignore[no-untyped-call]
    return gathered


@dataclass(frozen=True, slots=True)
class UnfoldedRows:
    """The rows of a pack of segments, each whole, for layers with a state that passes along a row."""

    index: Tensor
    """[N] int64: where the tokens of the rows, one row after another, are in the pack."""
    lengths: tuple[int, ...]
    back: Tensor
    """[P] int64: the first of these tokens that is each token of the pack; N for padding."""

    @classmethod
    def of(cls, row_positions: Sequence[Tensor], total: int, device: torch.device) -> UnfoldedRows:
        """Make them from the positions of each row, [n] int64, in a pack of ``total`` tokens."""
        index = torch.cat(list(row_positions))
        back = torch.full((total,), len(index)).scatter_reduce(0, index, torch.arange(len(index)), "amin")
        return cls(index.to(device), tuple(map(len, filter(len, row_positions))), back.to(device))

    def mixed(self, tokens: Tensor, mix: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
        """Return ``mix`` of whole rows, for the tokens [P, …] of the pack: [P, …]; differentiable."""
        out = mix(tokens.index_select(0, self.index), self.lengths)
        return torch.cat([out, out.new_zeros(1, *out.shape[1:])]).index_select(0, self.back)


@dataclass(frozen=True, slots=True)
class _QueryChunk:
    """Consecutive queries on this rank, of one sequence or of all that follow it, and the keys they can see."""

    query_start: int  # in the rank's local tokens
    queries: int
    key_start: int  # of the sequence, in the packed global order
    own_keys: int  # of the sequence itself, up to the last of its queries
    before: tuple[tuple[int, int], ...] = ()  # (start, tokens) of the segments before it, in the packed global order

    @property
    def keys(self) -> int:
        return sum(tokens for _, tokens in self.before) + self.own_keys

    def key_index(self, window: int | None = None) -> Tensor:
        """Return the keys [k] int64; those that no query sees through the window are left out."""
        parts = (*self.before, (self.key_start, self.own_keys))
        index = torch.cat([torch.arange(start, start + tokens) for start, tokens in parts])
        return index if window is None else index[-(self.queries + window - 1) :]


type Segments = tuple[tuple[int, int], ...]
"""Of each sequence of a pack: the one before it (-1: none), and its tokens without padding. All that follow a sequence
come right after it."""


def segments_of(params: PackedSeqParams | None) -> Segments | None:
    """Return the segments of a pack (``packed_inputs._sequence_params``); None if its sequences are separate."""
    return getattr(params, "segments", None)


def _before(lengths: tuple[int, ...], segments: Segments | None) -> list[tuple[tuple[int, int], ...]]:
    """Return (start, tokens) of the segments before each sequence, in the packed global order."""
    if segments is None:
        return [()] * len(lengths)
    paths: list[tuple[tuple[int, int], ...]] = []
    start = 0
    starts: list[int] = []
    for (parent, _), length in zip(segments, lengths, strict=True):
        paths.append(() if parent < 0 else (*paths[parent], (starts[parent], segments[parent][1])))
        starts.append(start)
        start += length
    return paths


def _query_chunks(lengths: tuple[int, ...], cp: int, rank: int, segments: Segments | None) -> list[_QueryChunk]:
    """Return the chunks of cp ``rank`` in the order of its tokens, each with all keys before it."""
    chunks: list[_QueryChunk] = []
    key_start = query_start = 0
    for length, before in zip(lengths, _before(lengths, segments), strict=True):
        chunk = length // (2 * cp) if cp > 1 else length
        for index in (rank, 2 * cp - 1 - rank) if cp > 1 else (0,):
            chunks.append(_QueryChunk(query_start, chunk, key_start, (index + 1) * chunk, before))
            query_start += chunk
        key_start += length
    return chunks


def _followers(lengths: tuple[int, ...], segments: Segments, cp: int) -> list[list[_QueryChunk]]:
    """Return, by depth of the segments that others follow, the queries on a rank that see all keys of one."""
    starts = [0, *accumulate(lengths)]
    depths: list[int] = []
    ends = list(range(1, len(segments) + 1))
    for number, (parent, _) in enumerate(segments):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        while parent >= 0:
            ends[parent] = number + 1
            parent = segments[parent][0]
    levels: list[list[_QueryChunk]] = [[] for _ in range(max(depths))]
    for number, end in enumerate(ends):
        if end > number + 1:
            first = starts[number + 1] // cp
            queries = starts[end] // cp - first
            levels[depths[number]].append(_QueryChunk(first, queries, starts[number], segments[number][1]))
    return levels


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks of similar size that run as one batch of n."""

    query_index: Tensor  # [n · q] int64 into the local tokens
    key_index: Tensor  # [n · k] int64 into the global tokens
    shape: tuple[int, int, int]  # n, q, k
    mask: Tensor | None  # [n, 1, q, k] bool, True = attend; None: plain causal with q == k
    kept: Tensor  # rows of the flattened [n · q] result that are real
    contiguous: bool  # query_index is one run without padding, so a view is enough


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The groups to run, and the index of each local token in their concatenated results."""

    groups: tuple[ChunkGroup, ...]
    order: Tensor | None  # None: already in order


def with_deterministic_backward(out: Tensor) -> Tensor:
    """Make the kernel that computed ``out`` […] use its deterministic backward pass in a deterministic run.

    torch's attention kernels use it only if nondeterministic operations raise, not if they warn
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu), and ``device.use_deterministic_kernels`` warns.
    """
    warns = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    if warns and out.grad_fn is not None:
        # the mode is global and read when the backward kernel starts, so it is switched around it alone
        out.grad_fn.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
    return out


_MEASURED = 1 << 24
"""Logits that are computed at a time to find the largest one."""
_SIMILAR = 0.75  # a chunk shorter than this fraction of its group's longest starts a new group


@lru_cache(maxsize=64)
def attention_plan(
    lengths: tuple[int, ...],
    cp: int,
    rank: int,
    window: int | None,
    device: torch.device,
    segments: Segments | None = None,
) -> AttentionPlan:
    """Plan the attention of cp ``rank`` for a pack of sequences with these padded ``lengths``.

    ``window``: number of keys that a query sees, itself included; None: full causal attention. ``segments``: None if
    the sequences are separate.
    """
    pieces = _query_chunks(lengths, cp, rank, segments)
    # longest first: a group is padded to its first member
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].keys, -pieces[i].queries))
    groups: list[ChunkGroup] = []
    members: list[int] = []
    for i in order:
        if members and not _similar(pieces[members[0]], pieces[i]):
            # in the order of the pack, so that a group of neighbours is a view of its memory
            groups.append(_group([pieces[m] for m in sorted(members)], cp, window, device))
            members = []
        members.append(i)
    groups.append(_group([pieces[m] for m in sorted(members)], cp, window, device))
    results = torch.cat([group.query_index[group.kept] for group in groups])
    in_order = bool((results[1:] > results[:-1]).all())
    return AttentionPlan(tuple(groups), None if in_order else torch.argsort(results))


def _similar(longest: _QueryChunk, other: _QueryChunk) -> bool:
    return other.keys >= _SIMILAR * longest.keys and other.queries >= _SIMILAR * longest.queries


def _group(pieces: list[_QueryChunk], cp: int, window: int | None, device: torch.device) -> ChunkGroup:
    q, k = max(p.queries for p in pieces), max(p.keys for p in pieces)
    step_q, step_k = torch.arange(q), torch.arange(k)
    queries = torch.tensor([p.queries for p in pieces])[:, None]
    keys = torch.tensor([p.keys for p in pieces])[:, None]
    query_start = torch.tensor([p.query_start for p in pieces])[:, None]
    # padding repeats the last real index: reading it is harmless, and its result is dropped
    query_index = (query_start + torch.minimum(step_q, queries - 1)).flatten()
    key_index = torch.cat([p.key_index()[torch.minimum(step_k, torch.tensor(p.keys - 1))] for p in pieces])
    mask = None
    if cp > 1 or window is not None or any(p.before for p in pieces):
        # a chunk's queries are the last of its keys
        position = (keys - queries)[..., None] + step_q[None, :, None]  # of each query in its sequence
        mask = step_k[None, None, :] <= position
        if window is not None:
            mask &= step_k[None, None, :] > position - window
        mask = mask[:, None].to(device)
    kept = (step_q[None, :] < queries).flatten().nonzero().squeeze(1)
    contiguous = len(kept) == len(query_index) and bool((query_index.diff() == 1).all())
    return ChunkGroup(
        query_index.to(device),
        key_index.to(device),
        (len(pieces), q, k),
        mask,
        kept.to(device),
        contiguous and (cp == 1),
    )


@lru_cache(maxsize=64)
def path_pieces(
    lengths: tuple[int, ...], segments: Segments, cp: int, rank: int, dtype: torch.dtype, device: torch.device
) -> tuple[BatchedPiece, ...]:
    """Return the pieces of a pack of segments: each with its own keys, and all that follow a segment with its keys."""
    pieces = []
    for group in attention_plan(lengths, cp, rank, None, device).groups:
        n, q, _ = group.shape
        mask = None
        if group.mask is not None:
            mask = torch.zeros(group.mask.shape, dtype=dtype, device=device).masked_fill_(~group.mask, -torch.inf)
        kept = group.kept if len(group.kept) < n * q else None
        queries = group.query_index.index_select(0, group.kept)
        pieces.append(BatchedPiece(queries, group.key_index, group.shape, mask is None, mask, kept))
    for chunk in (chunk for level in _followers(lengths, segments, cp) for chunk in level):
        keys = slice(chunk.key_start, chunk.key_start + chunk.own_keys)
        shape = (1, chunk.queries, chunk.own_keys)
        pieces.append(BatchedPiece(_ranges([chunk]).to(device), keys, shape, causal=False))
    return tuple(pieces)


@lru_cache(maxsize=64)
def flash_pieces(
    lengths: tuple[int, ...],
    cp: int,
    rank: int,
    window: int | None,
    device: torch.device,
    segments: Segments | None = None,
) -> tuple[FlashPiece, ...]:
    """Return the pieces of a pack for the flash kernel, with the arguments of :func:`attention_plan`.

    They are all queries with the keys of their own sequence, and for each depth of segments the queries that follow
    one with its keys. A window reaches back over few tokens: their keys are copied for each segment instead.
    """
    joins = segments is not None and window is None
    chunks = _query_chunks(lengths, cp, rank, None if joins else segments)
    copied = cp > 1 or any(chunk.before for chunk in chunks)
    pieces = [_flash_piece(chunks, window, device, causal=True, copied=copied)]
    if segments is not None and joins:
        levels = _followers(lengths, segments, cp)
        pieces += [_flash_piece(level, None, device, causal=False, copied=True) for level in levels]
    return tuple(pieces)


def _flash_piece(
    chunks: Sequence[_QueryChunk], window: int | None, device: torch.device, *, causal: bool, copied: bool
) -> FlashPiece:
    counts = of_keys = [chunk.queries for chunk in chunks]
    queries: Tensor | slice = slice(None) if causal else _ranges(chunks).to(device)
    keys: Tensor | slice = slice(None)
    if copied:
        seen = [chunk.key_index(window) for chunk in chunks]
        of_keys, keys = [len(index) for index in seen], torch.cat(seen).to(device)
    starts, key_starts = (torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(device) for n in (counts, of_keys))
    return FlashPiece((starts, key_starts, max(counts), max(of_keys)), queries, keys, causal, window)


def _ranges(chunks: Sequence[_QueryChunk]) -> Tensor:
    return torch.cat([torch.arange(c.query_start, c.query_start + c.queries) for c in chunks])


class KeySelection(NamedTuple):
    """The keys that the queries of a group attend to, and the scores that selected them if the indexer is trained."""

    mask: Tensor
    """[n, 1, q, k] bool, True = attend, for the n chunks of a group; [b, 1, S, S] for padded inputs."""
    scores: Tensor | None = None
    """[n, q, k] indexer score of every key, differentiable; None if the indexer is not trained."""
    counted: Tensor | None = None
    """[n, q]: 1.0 for queries of real tokens, 0.0 for padding; set with ``scores``."""


KeySelector = Callable[[ChunkGroup | None], KeySelection]
"""Selects keys for a group of chunks; the argument is None for padded inputs."""


class PackedAttention(torch.nn.Module):
    """Causal scaled dot-product attention for packed (``thd``) and padded (``sbhd``) inputs.

    Takes the arguments of Megatron's core attention, and ``k_channels`` and ``v_channels`` of multi-latent attention.
    Sliding windows (``config.window_size``) and learnable sinks (``config.softmax_type``: one extra softmax logit per
    head, without a value) work as in transformer/dot_product_attention.py.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **channels: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.config, self.groups = config, pg_collection
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        head_dim = channels.get("k_channels") or config.kv_channels
        self.own_rotary = config.multi_latent_attention  # MLA applies rotary embedding itself, to a part of each head
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.current_max_attn_logits: Tensor | None = None
        """[heads of this rank] fp32: the largest scaled logit of real queries since the last step, with
        ``config.qk_clip`` or ``log_max_attention_logit``; Transformer Engine's name."""
        self.measures = bool(config.qk_clip or config.log_max_attention_logit)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            sinks: Any = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride = True, 0, 1
            self.softmax_offset = sinks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **more: Any,
    ) -> Tensor:
        """Attend: query [p, heads, d], key and value [p, kv heads, d] → [p, heads · d], for p tokens on this rank.

        Padded inputs have [S, b, …] in place of [p, …].
        """
        choose = self.key_selector(packed_seq_params, **more)
        if packed_seq_params is None:
            mask = self._window_mask(query) if choose is None else choose(None)
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)
        lengths, segments = packed_seq_params.padded_lengths, segments_of(packed_seq_params)
        # Megatron applied no rotary embedding to a packed input, see PackedRotary
        if (table := getattr(packed_seq_params, "rotary", None)) is not None and not self.own_rotary:
            query, key = (rotate(x, table, interleaved=self.config.rotary_interleaved) for x in (query, key))
        if self.measures and self.training and torch.is_grad_enabled():
            self._measure(query, key, packed_seq_params, choose)
        if exact_ops.active():
            assert segments is None  # refused with exact rollouts: the engine computes each row by itself
            return self._attend_exactly(query, key, value, lengths)
        cp = self.groups.cp
        key = gather_tokens(key, lengths, cp, shared_loss=False)
        value = gather_tokens(value, lengths, cp, shared_loss=False)
        # the kernel has no selection of keys and no float32
        if choose is None and query.is_cuda and query.dtype != torch.float32:
            pieces = flash_pieces(lengths, cp.size(), cp.rank(), self.window, query.device, segments)
            return self._join(query, key, value, pieces)
        if segments is not None and choose is None and self.window is None and not query.is_cuda:
            of_segments = path_pieces(lengths, segments, cp.size(), cp.rank(), query.dtype, query.device)
            return self._join(query, key, value, of_segments)
        plan = attention_plan(lengths, cp.size(), cp.rank(), self.window, query.device, segments)
        results = [self._attend_group(query, key, value, group, choose) for group in plan.groups]
        out = results[0] if len(results) == 1 else torch.cat(results)
        return out if plan.order is None else out.index_select(0, plan.order)

    def key_selector(self, packed_seq_params: PackedSeqParams | None, **_: Any) -> KeySelector | None:
        """Return a function that selects keys among those that the mask allows; None: queries see all of them."""
        return None

    @torch.no_grad()
    def _measure(self, query: Tensor, key: Tensor, params: PackedSeqParams, choose: KeySelector | None) -> None:
        """Update ``current_max_attn_logits``, which attention kernels do not return."""
        lengths, padding, cp = params.padded_lengths, params.padding, self.groups.cp
        key = gather_tokens(key, lengths, cp, shared_loss=False)
        plan = attention_plan(lengths, cp.size(), cp.rank(), self.window, query.device, segments_of(params))
        largest = query.new_full((query.shape[1],), -torch.inf, dtype=torch.float32)
        for group in plan.groups:
            n, q, k = group.shape
            queries = query.index_select(0, group.query_index).view(n, q, *query.shape[1:]).transpose(1, 2).float()
            keys = key.index_select(0, group.key_index).view(n, k, *key.shape[1:]).transpose(1, 2).float()
            keys = keys.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
            real = ~padding.index_select(0, group.query_index).view(n, 1, q, 1)
            mask = group.mask if choose is None else choose(group).mask
            if mask is None:
                mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril()
            mask = mask.expand(n, 1, q, k)
            rows = max(1, _MEASURED // (n * k * query.shape[1]))
            for start in range(0, q, rows):
                part = slice(start, start + rows)
                logits = queries[:, :, part] @ keys * self.scale
                logits = logits.masked_fill(~(mask & real)[:, :, part], -torch.inf)
                largest = largest.maximum(logits.amax((0, 2, 3)))
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else largest.maximum(before)

    def _attend_group(
        self, query: Tensor, key: Tensor, value: Tensor, group: ChunkGroup, choose: KeySelector | None
    ) -> Tensor:
        """Attend in one batch of chunks → [real queries, heads · d]."""
        n, q, k = group.shape
        if group.contiguous and n * q == len(query):
            rows = [x.view(n, -1, *x.shape[1:]) for x in (query, key, value)]
        else:
            # padded copies, because SDPA takes batches of one length
            rows = [query.index_select(0, group.query_index).view(n, q, *query.shape[1:])]
            rows += [x.index_select(0, group.key_index).view(n, k, *x.shape[1:]) for x in (key, value)]
        queries, keys, values = (x.transpose(1, 2) for x in rows)
        out = self._attend(queries, keys, values, group.mask if choose is None else choose(group))
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)
        return out if len(group.kept) == n * q else out.index_select(0, group.kept)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | KeySelection | None) -> Tensor:
        """Attend: [n, heads, q, d] × [n, kv heads, k, d] → [n, heads, q, d]. ``mask`` None: plain causal."""
        mask = mask.mask if isinstance(mask, KeySelection) else mask
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        dropout = self.dropout if self.training else 0.0
        if self.softmax_offset is None:
            return with_deterministic_backward(
                F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=self.scale
                )
            )
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = (query @ key.transpose(-1, -2) * self.scale).masked_fill(~mask, -torch.inf)
        sink = self.softmax_offset.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        # fp32: a sink is a logit like any other, and its exponential must not be rounded to half precision
        weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype)
        return F.dropout(weights, dropout) @ value

    def _attend_exactly(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Attend as the engine does (``trainer.exact_rollouts``): [p, heads, d] → [p, heads · d]."""
        assert self.window is None and self.softmax_offset is None and self.groups.cp.size() == 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return exact_ops.attention(q, k, v, lengths, lengths, self.scale)

        ordinary = exact_ops.ordinary_attention(lengths, self.scale)
        return exact_ops.with_gradient(attend, ordinary, query, key, value).flatten(1)

    def _join(self, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[FlashPiece | BatchedPiece]) -> Tensor:
        """Attend piece by piece: query [p, heads, d], key and value [P, kv heads, d or less] → [p, heads · d]."""
        # kernels take one head size: zeros in the values of latent attention add nothing, their columns are cut off
        width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
        value = F.pad(value, (0, missing)) if missing else value
        inputs = (x.contiguous() for x in (query, key, value))
        out = JoinedAttention.apply(*inputs, self.softmax_offset, pieces, self.scale)  # type: ignore[no-untyped-call]
        return with_deterministic_backward(out)[..., :width].flatten(1)

    def _window_mask(self, query: Tensor) -> Tensor | None:
        """Return the sliding window of padded inputs [S, b, …] as [S, S] bool; None without one."""
        if self.window is None:
            return None
        position = torch.arange(query.shape[0], device=query.device)
        distance = position[:, None] - position[None, :]
        mask: Tensor = (distance >= 0) & (distance < self.window)
        return mask

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare the sinks as split over tp by head; Megatron's default would declare them as replicated."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=self.groups.dp_cp,
        )
        return sharded
