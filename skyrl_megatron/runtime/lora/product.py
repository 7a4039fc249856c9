"""The two thin products of an adapter, without what autograd's own would keep and move.

Beside a frozen map they are bound by memory: autograd's own writes B·h, its scaled copy and the sum, each as large as
the map's output, and gathers the experts'. Here each is written where it belongs, scaled and summed as it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.runtime.cpu.gemm import grouped_gemm

_ALIGNED = 16
"""Bytes that rows of a CUDA kernel's grouped products must be multiples of."""


def factor_product(x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
    """Compute x · weightᵀ: [..., k] × [m, k] → [..., m]; or with [E, m, k] of rows sorted by expert, ``counts`` [E] of
    each. Differentiable."""
    if weight.dim() == 3 and x.is_cuda:
        return _grouped(x, weight, _required(counts))
    return _product(None, x, weight, counts, 1.0)


def add_factor_product(base: Tensor, x: Tensor, weight: Tensor, counts: Tensor | None, scale: float) -> Tensor:
    """Add scale · :func:`factor_product` to ``base`` [..., m], in its memory, and return that. Differentiable.

    Nothing else may read ``base`` afterwards, as nothing reads the output of a linear map that its hook replaces; a
    backward pass that needs its old values raises autograd's error. Types are those of ``base``.
    """
    if weight.dim() == 3 and base.is_cuda:
        return base + _grouped(x * scale, weight, _required(counts))
    return _product(base, x, weight, counts, scale)


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply as :func:`grouped_gemm`, with zeros beside a rank that no kernel for all experts takes: without them
    the host would wait for ``counts`` in every layer, and start a kernel for each expert."""
    missing_in, missing_out = (-size % (_ALIGNED // x.element_size()) for size in (x.shape[-1], weight.shape[-2]))
    if not missing_in and not missing_out:
        return grouped_gemm(x, weight, counts)
    padded = grouped_gemm(F.pad(x, (0, missing_in)), F.pad(weight, (0, missing_in, 0, missing_out)), counts)
    return padded[..., : weight.shape[-2]]


def _product(base: Tensor | None, x: Tensor, weight: Tensor, counts: Tensor | None, scale: float) -> Tensor:
    rows = [x.numel() // x.shape[-1]] if weight.dim() == 2 else _required(counts).tolist()
    product: Tensor = _FactorProduct.apply(base, x, weight, rows, scale)  # type: ignore[no-untyped-call]
    return product


class _FactorProduct(torch.autograd.Function):
    """base[rows of e] + scale · x[rows of e] @ w[e]ᵀ, in the memory of ``base``; without one, a new tensor. A matrix
    of no expert is that of the only one."""

    @staticmethod
    def forward(ctx: Any, base: Tensor | None, x: Tensor, weight: Tensor, counts: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.scale = counts, scale
        out = x.new_empty(*x.shape[:-1], weight.shape[-2]) if base is None else base.detach().contiguous()
        kept = 0.0 if base is None else 1.0  # times zero, memory is not read: what lay there may be no number
        for rows, own, matrix in zip(_split(out, counts), _split(x, counts), _each(weight), strict=True):
            rows.addmm_(own, matrix.t(), beta=kept, alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shares = _split(grads[0], ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for rows, grad, matrix in zip(_split(grad_x, ctx.counts), shares, _each(weight), strict=True):
                rows.addmm_(grad, matrix, beta=0.0, alpha=ctx.scale)
        if ctx.needs_input_grad[2]:
            # An expert without rows gets zeros.
            products = [_weight_gradient(*pair) for pair in zip(shares, _split(x, ctx.counts), strict=True)]
            grad_weight = torch.stack(products).view(weight.shape).mul_(ctx.scale)
        return grads[0] if ctx.needs_input_grad[0] else None, grad_x, grad_weight, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return gradᵀ · x, by the order that is faster for a thin side: that of A is grad's, that of B is x's."""
    return grad.t() @ x if grad.shape[-1] < x.shape[-1] else (x.t() @ grad).t()


def _required(counts: Tensor | None) -> Tensor:
    assert counts is not None
    return counts


def _each(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 3 else weight[None]


def _split(rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return the rows of each matrix, as views where ``rows`` are contiguous."""
    parts: tuple[Tensor, ...] = rows.reshape(-1, rows.shape[-1]).split(counts)
    return parts
