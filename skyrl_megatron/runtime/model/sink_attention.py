"""Variable-length flash attention with learnable sinks (gpt-oss): one extra softmax logit per head, without a value.

torch's kernel has no sinks, but its output and its log-sum-exp ``L`` are all that they need. With the sink ``s``,
``L' = log(exp L + exp s)``, and the output is the kernel's times ``exp(L − L')``. The kernel's backward pass computes
``P = exp(scores − L)`` and ``dS = P (dP − rowsum(dO · O))``. Given ``L'`` and the new output it therefore returns the
gradients of queries, keys and values, because the sink's value is zero. The sink's own gradient is
``−exp(s − L') rowsum(dO · O)``.

No [heads, queries, keys] tensor exists, and keys and values are not repeated for the queries of their group.
"""

from __future__ import annotations

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
