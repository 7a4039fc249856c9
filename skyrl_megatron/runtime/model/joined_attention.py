"""Attention that is joined from pieces of the keys: by flash kernels, with sinks (gpt-oss) and with shared prefixes.

A flash kernel returns the output ``O`` and the log-sum-exp ``L`` of the scores. Over all pieces ``L = log Σ exp L_i``
and ``O = Σ exp(L_i − L) O_i``. A sink, one extra softmax logit ``s`` per head without a value, is a piece with
``L_i = s`` and ``O_i = 0``. The kernel's backward pass computes ``P = exp(scores − L)`` and
``dS = P (dP − rowsum(dO · O))``. Given ``L`` and ``O`` of all pieces, it therefore returns the piece's share of the
gradients of queries, keys and values. The sink's own gradient is ``−exp(s − L) rowsum(dO · O)``.

So queries of several segments of a pack see the keys of the segment before them without a copy for each, and no
[heads, queries, keys] tensor exists. How a piece is computed is all that differs by device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlashPiece:
    """Queries of a pack and keys that they see, for torch's variable-length flash kernel (CUDA, half precision).

    Both are sequences, one after another. The last query of a sequence is aligned with its last key.
    """

    sizes: tuple[Tensor, Tensor, int, int]
    """Where the queries and the keys of the sequences start, [sequences + 1] int32 on the device; the longest ones."""
    queries: Tensor | slice = slice(None)
    """[q] int64 into the rank's tokens."""
    keys: Tensor | slice = slice(None)
    """[k] int64 into the tokens of all cp ranks."""
    causal: bool = True
    """Whether a query sees the keys up to the one that it is aligned with."""
    window: int | None = None
    """Number of keys that a query sees, the aligned one included; None: all before it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output [q, heads, d] and the log-sum-exp of the scores [q, heads] fp32 of this piece's rows."""
        # torch's own operator, because the backward pass of varlen_attn takes no log-sum-exp
        made = torch.ops.aten._flash_attention_forward(
            query, key, value, *self._arguments, return_debug_mask=False, scale=scale, **self._window
        )
        return made[0], made[1].mT

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value. ``out``, ``total``: output and log-sum-exp of all pieces."""
        inputs = gradient, query, key, value, out, total.mT.contiguous()
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
        unused = torch.empty(0, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *inputs, *self._arguments, state, unused, scale=scale, **self._window
        )
        return gradients

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return *self.sizes, 0.0, self.causal and self.window is None  # 0.0: dropout

    @property
    def _window(self) -> dict[str, int]:
        """The keys that a query sees on both sides of the aligned one; -1: all."""
        left = -1 if self.window is None else self.window - 1
        return {"window_size_left": left, "window_size_right": 0 if self.causal else -1}


@dataclass(frozen=True, slots=True, eq=False)
class BatchedPiece:
    """Queries of a pack and keys that they see, for the CPU's kernel: n batches of q queries and k keys."""

    queries: Tensor
    """[r] int64 into the rank's tokens."""
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output [r, heads, d] and the log-sum-exp of the scores [r, heads] of this piece's rows."""
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *self._inputs(query, key, value), 0.0, self.causal, attn_mask=self.mask, scale=scale
        )
        return self._real(out), self._real(logsumexp)

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value. ``out``, ``total``: output and log-sum-exp of all pieces."""
        padded = [self._padded(x).contiguous() for x in (gradient, out, total)]
        d_query, *rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            padded[0],
            *self._inputs(query, key, value),
            *padded[1:],
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=scale,
        )
        d_key, d_value = (x.unflatten(1, (key.shape[1], -1)).sum(2).transpose(1, 2).flatten(0, 1) for x in rest)
        return self._real(d_query), d_key, d_value

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return them as the kernel takes them, [n, heads, q or k, d], with equal numbers of heads."""
        n, _, k = self.shape
        keys, values = (
            x.unflatten(0, (n, k)).transpose(1, 2).repeat_interleave(query.shape[1] // x.shape[1], 1)
            for x in (key, value)
        )
        return self._padded(query), keys, values

    def _real(self, batch: Tensor) -> Tensor:
        """Return the real queries' values [r, heads, …] of [n, heads, q, …]."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        return rows if self.kept is None else rows.index_select(0, self.kept)

    def _padded(self, rows: Tensor) -> Tensor:
        """Return [n, heads, q, …] of the real queries' values [r, heads, …]; 0 for padding."""
        n, q, _ = self.shape
        if self.kept is not None:
            rows = rows.new_zeros(n * q, *rows.shape[1:]).index_copy_(0, self.kept, rows)
        batch: Tensor = rows.unflatten(0, (n, q)).transpose(1, 2)
        return batch


def _rows(x: Tensor, of: Tensor | slice) -> Tensor:
    return x[of] if isinstance(of, slice) else x.index_select(0, of)


def _added(total: Tensor | None, like: Tensor, of: Tensor | slice, part: Tensor) -> Tensor:
    """Return ``total`` (None: zeros of the shape of ``like``) with ``part`` added to some of its rows."""
    if total is None:
        if len(part) == len(like) and isinstance(of, slice):
            return part
        total = torch.zeros_like(like, dtype=part.dtype)
    if isinstance(of, slice):
        total[of] += part
        return total
    return total.index_add_(0, of, part)


class JoinedAttention(torch.autograd.Function):
    """Attention over the keys of all pieces. ``apply(query, key, value, sinks, pieces, scale)`` returns [p, heads, d].

    ``query``: [p, heads, d]; ``key``, ``value``: [P, kv heads, d]; ``sinks``: [heads] or None. Every query is in a
    piece. A piece with all queries comes first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pieces: Sequence[FlashPiece | BatchedPiece],
        scale: float,
    ) -> Tensor:
        """Return [p, heads, d], in the dtype of ``query``."""
        precise = torch.promote_types(query.dtype, torch.float32)
        out: Tensor | None = None
        total = query.new_empty(0)
        for piece in pieces:
            part, of_part = piece.attend(
                _rows(query, piece.queries), _rows(key, piece.keys), _rows(value, piece.keys), scale
            )
            if out is None and isinstance(piece.queries, slice):
                out, total = part if len(pieces) == 1 else part.to(precise), of_part
                continue
            if out is None:
                out = torch.zeros_like(query, dtype=precise)
                total = query.new_full(query.shape[:2], -torch.inf, dtype=precise)
            before = _rows(total, piece.queries)
            after = torch.logaddexp(before, of_part)
            joined = _rows(out, piece.queries) * (before - after).exp()[..., None]
            out[piece.queries] = joined.addcmul_(part, (of_part - after).exp()[..., None])
            total[piece.queries] = after
        assert out is not None
        if sinks is not None:
            after = torch.logaddexp(total, sinks.to(precise))
            out, total = out * (total - after).exp()[..., None], after
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query [p, heads, d], key, value [P, kv heads, d] and sinks [heads]."""
        query, key, value, sinks, out, total = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sums: list[Tensor | None] = [None, None, None]
        for piece in ctx.pieces:
            of_out = [_rows(x, piece.queries) for x in (out, total)]
            inputs = _rows(query, piece.queries), _rows(key, piece.keys), _rows(value, piece.keys)
            parts = piece.gradients(_rows(gradient, piece.queries), *inputs, *of_out, ctx.scale)
            for number, (like, part) in enumerate(zip((query, key, value), parts, strict=True)):
                of = piece.keys if number else piece.queries
                if len(ctx.pieces) > 1 or not isinstance(of, slice):  # sums of half precision would be rounded
                    part = part.to(total.dtype)
                sums[number] = _added(sums[number], like, of, part)
        d_sinks = None
        if sinks is not None:
            products = (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1)
            d_sinks = -((sinks.to(total.dtype) - total).exp() * products).sum(0).to(sinks.dtype)
        return *(None if x is None else x.to(query.dtype) for x in sums), d_sinks, None, None
