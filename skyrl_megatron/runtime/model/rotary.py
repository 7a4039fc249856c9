"""Rotary embedding of all packed sequences at once.

Without Transformer Engine, Megatron rotates one packed sequence after another, in every layer, for queries and for
keys (models/common/embeddings/rope_utils.py). Here cosine and sine of a micro-batch's tokens are looked up once, and
the core attention rotates all tokens in a few operations.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from torch import Tensor

from skyrl_megatron.algorithms import exact_ops

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_STEP = 256  # table lengths are rounded up to multiples of this, which limits the number of tables


class PackedRotary(torch.nn.Module):
    """Replacement of ``GPTModel.rotary_pos_emb`` that stores a micro-batch's table in its ``PackedSeqParams``.

    Megatron's attention then applies no rotary embedding. ``stock``: Megatron's ``RotaryEmbedding`` or
    ``YarnRotaryEmbedding``, which still handles inputs that are not packed.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, config: Any, params: Any = None
    ) -> int:
        """Store the table in ``params`` and return 0; without packing, return the stock length.

        ``GPTModel`` calls this before :meth:`forward`, and passes the sequence boundaries only here.
        """
        if params is None:
            length: int = self.stock.get_rotary_seq_len(inference_context, transformer, transformer_input, config)
            return length
        params.rotary = self.table(params.positions, params.max_seqlen_kv)
        # not used: forward makes no table for packed inputs
        return 0

    def forward(self, length: int, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the value that ``GPTModel`` passes to its layers: None if the table is in the ``PackedSeqParams``."""
        if not packed_seq:
            return self.stock(length, packed_seq=False, cp_group=cp_group)
        # Yarn's module returns a pair, and its caller unpacks one
        return (None, None) if isinstance(self.stock, YarnRotaryEmbedding) else None

    def with_table(self, params: PackedSeqParams) -> PackedSeqParams:
        """Return ``params`` with this table in place of the model's, for layers with a different rotary base.

        The result is cached in ``params`` and shared by these layers.
        """
        if getattr(params, "other_rotary", None) is None:
            other = copy.copy(params)
            other.rotary = self.table(params.positions, params.max_seqlen_kv)
            params.other_rotary = other
        other_params: PackedSeqParams = params.other_rotary
        return other_params

    def table(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Look up cosine and sine [p, 1, d] of ``positions`` [p], d ≤ head size. ``longest``: longest sequence."""
        length = -(-longest // _STEP) * _STEP
        angles, scale = self.stock(length, packed_seq=True), 1.0
        if isinstance(self.stock, YarnRotaryEmbedding):
            angles, scale = angles
        angles = angles[:, 0].index_select(0, positions)
        return angles.cos() * scale, angles.sin() * scale


class _Rotate(torch.autograd.Function):
    """x·cos + R(x)·sin, where R maps each pair (a, b) to (−b, a). The transpose is the same with −sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, ctx.interleaved, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    width = cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if width < x.shape[-1]:
        # entries beyond the rotary part are not rotated
        out[..., width:] = x[..., width:]
    (a, b), (to_a, to_b), (cos, _), (sin, _) = (_pairs(t, width, interleaved) for t in (x, out, cos, sin))
    torch.mul(a, cos, out=to_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=to_b).addcmul_(a, sin, value=sign)
    return out


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Split into the first and second members of the pairs: adjacent entries if ``interleaved``, else halves."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def rotate(x: Tensor, table: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Rotate ``x`` [p, heads, head size] by the table [p, 1, d]; entries beyond d are unchanged. Differentiable."""
    cos, sin = (values.to(x.dtype) for values in table)
    if exact_ops.active():
        cos, sin = (_pairs(values, values.shape[-1], interleaved)[0] for values in (cos, sin))
        return exact_ops.rotate(x, cos, sin, interleaved=interleaved)
    rotated: Tensor = _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return rotated
