"""Variable-length flash attention with learnable sinks (gpt-oss): one extra softmax logit per head, without a value.

torch's kernel has no sinks, but its output and its log-sum-exp ``L`` are all that they need. With the sink ``s``,
``L' = log(exp L + exp s)``, and the output is the kernel's times ``exp(L − L')``. The kernel's backward pass computes
``P = exp(scores − L)`` and ``dS = P (dP − rowsum(dO · O))``. Given ``L'`` and the new output it therefore returns the
gradients of queries, keys and values, because the sink's value is zero. The sink's own gradient is
``−exp(s − L') rowsum(dO · O)``.

No [heads, queries, keys] tensor exists, and keys and values are not repeated for the queries of their group.

The same identity joins attention over parts of the keys (:class:`JoinedAttention`): with ``L'`` of all parts, the
backward pass of each part gives its share of the gradients. So queries of several segments of a pack see the keys of
the segment before them without a copy for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences of a pack, and the keys that their queries see."""

    starts: Tensor
    """[sequences + 1] int32: where the sequences start, on the device."""
    longest: int
    scale: float
    window: int | None
    """Number of keys that a query sees, itself included; None: all before it."""
    key_starts: Tensor | None = None
    """[sequences + 1] int32: where the keys of the sequences start; None: where the queries do."""
    longest_keys: int = 0

    @property
    def sizes(self) -> tuple[Tensor, Tensor, int, int]:
        """The kernel's arguments for starts and longest sequences of queries and keys."""
        if self.key_starts is None:
            return self.starts, self.starts, self.longest, self.longest
        return self.starts, self.key_starts, self.longest, self.longest_keys

    @property
    def options(self) -> dict[str, Any]:
        """The kernel's arguments for scale and window; -1: no limit to the left."""
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


def flash_forward(query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    """Return the output [p, heads, d] and the log-sum-exp of the scores [heads, p] fp32, without sinks."""
    # torch's own operator, because varlen_attn does not return the log-sum-exp
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *pack.sizes, 0.0, pack.window is None, return_debug_mask=False, **pack.options
    )
    return found[0], found[1]


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, pack: Pack
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query [p, heads, d], key and value [p, kv heads, d], in their dtypes."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    unused = torch.empty(0, device=query.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        out,
        logsumexp,
        *pack.sizes,
        0.0,
        pack.window is None,
        state,
        unused,
        **pack.options,
    )
    return gradients


class SinkAttention(torch.autograd.Function):
    """Causal attention with sinks. ``apply(query, key, value, sinks, pack)`` returns [p, heads, d].

    ``query``: [p, heads, d]; ``key``, ``value``: [p, kv heads, d]; ``sinks``: [heads].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, pack: Pack) -> Tensor:
        """Return [p, heads, d], in the dtype of ``query``."""
        out, logsumexp = flash_forward(query, key, value, pack)
        # in fp32, as the log-sum-exp is
        total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
        out = (out * (logsumexp - total).exp().mT.unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.pack = pack
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value [p, heads, d] and sinks [heads]."""
        query, key, value, sinks, out, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        # the kernel forms P from the log-sum-exp that it is given: with the sink in it, P is that of the sinks
        found = flash_backward(gradient, query, key, value, out, total, ctx.pack)
        products = (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1).mT  # [heads, p]
        share = (sinks.to(total.dtype)[:, None] - total).exp()
        return *found, -(share * products).sum(1).to(sinks.dtype), None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Queries of a pack and some of the keys that they see: n batches of q queries and k keys."""

    queries: Tensor
    """[n · q] int64 into the rank's tokens; the last real one is repeated as padding."""
    keys: Tensor | slice
    """[n · k] int64 into the tokens of all cp ranks."""
    shape: tuple[int, int, int]
    """n, q, k."""
    causal: bool
    """Whether query i sees the keys up to i, of as many keys as queries."""
    mask: Tensor | None = None
    """[n, 1, q, k]: 0 for keys that a query sees, else -inf. None: all of them, or as ``causal`` says."""
    kept: Tensor | None = None
    """[r] int64: which of the n · q queries are real. None: all."""

    def batch(self, rows: Tensor, of: Tensor | slice, length: int) -> Tensor:
        """Return [n, heads, length, …] of ``rows`` [p, heads, …]."""
        taken = rows[of] if isinstance(of, slice) else rows.index_select(0, of)
        batch: Tensor = taken.unflatten(0, (self.shape[0], length)).transpose(1, 2)
        return batch

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as the kernel takes them, [n, heads, q or k, d]: of equal heads and sizes."""
        _, q, k = self.shape
        queries = self.batch(query, self.queries, q)
        keys, values = (
            self.batch(x, self.keys, k).repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value)
        )
        if missing := query.shape[-1] - value.shape[-1]:
            values = torch.nn.functional.pad(values, (0, missing))
        return queries, keys, values

    def real(self, batch: Tensor) -> Tensor:
        """Return the real queries' values [r, heads, …] of [n, heads, q, …]."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        return rows if self.kept is None else rows.index_select(0, self.kept)

    def padded(self, rows: Tensor) -> Tensor:
        """Return [n, heads, q, …] of the real queries' values [r, heads, …]; 0 for padding."""
        n, q, _ = self.shape
        if self.kept is not None:
            rows = rows.new_zeros(n * q, *rows.shape[1:]).index_copy_(0, self.kept, rows)
        batch: Tensor = rows.unflatten(0, (n, q)).transpose(1, 2)
        return batch

    @property
    def rows(self) -> Tensor:
        """[r] int64: the real queries."""
        return self.queries if self.kept is None else self.queries.index_select(0, self.kept)


class JoinedAttention(torch.autograd.Function):
    """Attention over the keys of all pieces, on the CPU. ``apply(query, key, value, sinks, pieces, scale)`` returns
    [p, heads, value size].

    ``query``: [p, heads, d]; ``key``, ``value``: [P, kv heads, d or value size]; ``sinks``: [heads] or None. Every
    query is in a piece.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pieces: Sequence[Piece],
        scale: float,
    ) -> Tensor:
        """Return [p, heads, value size], in the dtype of ``query``."""
        width, precise = value.shape[-1], torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:2], width, dtype=precise)
        total = query.new_full(query.shape[:2], -torch.inf, dtype=precise)
        for piece in pieces:
            attended, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *piece.inputs(query, key, value), 0.0, piece.causal, attn_mask=piece.mask, scale=scale
            )
            part, of_part, rows = piece.real(attended)[..., :width], piece.real(logsumexp), piece.rows
            before = total.index_select(0, rows)
            after = torch.logaddexp(before, of_part)
            joined = out.index_select(0, rows) * (before - after).exp()[..., None]
            out.index_copy_(0, rows, joined + part * (of_part - after).exp()[..., None])
            total.index_copy_(0, rows, after)
        if sinks is not None:
            after = torch.logaddexp(total, sinks.to(precise))
            out, total = out * (total - after).exp()[..., None], after
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query [p, heads, d], key, value [P, kv heads, …] and sinks [heads]."""
        query, key, value, sinks, out, total = ctx.saved_tensors
        gradient, width = gradients[0], value.shape[-1]
        sums = [torch.zeros_like(x) for x in (query, key, value)]
        groups, repeats = key.shape[1], query.shape[1] // key.shape[1]
        missing = query.shape[-1] - width
        for piece in ctx.pieces:
            of_out = [torch.nn.functional.pad(x, (0, missing)) if missing else x for x in (gradient, out)]
            rows = piece.rows
            of_rows = [piece.padded(x.index_select(0, rows)).contiguous() for x in (*of_out, total)]
            inputs = piece.inputs(query, key, value)
            d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_rows[0], *inputs, of_rows[1], of_rows[2], 0.0, piece.causal, attn_mask=piece.mask, scale=ctx.scale
            )
            sums[0].index_add_(0, rows, piece.real(d_query))
            for added, d_part in ((sums[1], d_key), (sums[2], d_value[..., :width])):
                d_rows = d_part.unflatten(1, (groups, repeats)).sum(2).transpose(1, 2).flatten(0, 1)
                if isinstance(piece.keys, slice):
                    added[piece.keys] += d_rows
                else:
                    added.index_add_(0, piece.keys, d_rows)
        d_sinks = None
        if sinks is not None:
            products = (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1)
            d_sinks = -((sinks.to(total.dtype) - total).exp() * products).sum(0).to(sinks.dtype)
        return *sums, d_sinks, None, None
