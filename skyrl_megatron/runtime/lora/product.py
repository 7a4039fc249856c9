"""The two thin products of an adapter, without what autograd's own would keep and move.

Beside a frozen map they are bound by memory: autograd's own writes B·h, its scaled copy and the sum, each as large as
the map's output, and gathers the experts'. Here each is written where it belongs, scaled and summed as it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.runtime.cpu.gemm import grouped_gemm


def factor_product(x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
    """Compute x · weightᵀ: [..., k] × [m, k] → [..., m]; or with [E, m, k] of rows sorted by expert, ``counts`` [E] of
    each. Differentiable."""
    if weight.dim() == 3 and x.is_cuda:
        return grouped_gemm(x, weight, _required(counts))
    product: Tensor = _FactorProduct.apply(x, weight, _rows(x, weight, counts))  # type: ignore[no-untyped-call]
    return product


def add_factor_product(base: Tensor, x: Tensor, weight: Tensor, counts: Tensor | None, scale: float) -> Tensor:
    """Add scale · :func:`factor_product` to ``base`` [..., m], in its memory, and return that. Differentiable.

    Nothing else may read ``base`` afterwards, as nothing reads the output of a linear map that its hook replaces; a
    backward pass that needs its old values raises autograd's error. Types are those of ``base``.
    """
    if weight.dim() == 3 and base.is_cuda:
        return base + grouped_gemm(x * scale, weight, _required(counts))
    rows = _rows(x, weight, counts)
    added: Tensor = _AddFactorProduct.apply(base, x, weight, rows, scale)  # type: ignore[no-untyped-call]
    return added


class _FactorProduct(torch.autograd.Function):
    """y[rows of e] = x[rows of e] @ w[e]ᵀ; a matrix of no expert is that of the only one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(*x.shape[:-1], weight.shape[-2])
        for rows, wide, matrix in zip(_split(out, counts), _split(x, counts), _each(weight), strict=True):
            torch.mm(wide, matrix.t(), out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shares = _split(grads[0], ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _times(shares, weight, x, ctx.counts)
        if ctx.needs_input_grad[1]:
            pairs = zip(shares, _split(x, ctx.counts), strict=True)
            grad_weight = torch.stack([grad.t() @ rows for grad, rows in pairs]).view(weight.shape)
        return grad_x, grad_weight, None


class _AddFactorProduct(torch.autograd.Function):
    """base[rows of e] += scale · x[rows of e] @ w[e]ᵀ."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, weight: Tensor, counts: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.scale = counts, scale
        out = base.detach().contiguous()
        for rows, narrow, matrix in zip(_split(out, counts), _split(x, counts), _each(weight), strict=True):
            rows.addmm_(narrow, matrix.t(), alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shares = _split(grads[0], ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_x = _times(shares, weight, x, ctx.counts).mul_(ctx.scale)
        if ctx.needs_input_grad[2]:
            # As (xᵀ · grad)ᵀ, which is faster than gradᵀ · x. An expert without rows gets zeros.
            pairs = zip(_split(x * ctx.scale, ctx.counts), shares, strict=True)
            grad_weight = torch.stack([(rows.t() @ grad).t() for rows, grad in pairs]).view(weight.shape)
        return grads[0], grad_x, grad_weight, None, None


def _times(shares: tuple[Tensor, ...], weight: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    """Return the gradient of ``x``."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, grad, matrix in zip(_split(grad_x, counts), shares, _each(weight), strict=True):
        torch.mm(grad, matrix, out=rows)
    return grad_x


def _rows(x: Tensor, weight: Tensor, counts: Tensor | None) -> list[int]:
    """Return how many rows belong to each matrix."""
    found: list[int] = [x.numel() // x.shape[-1]] if weight.dim() == 2 else _required(counts).tolist()
    return found


def _required(counts: Tensor | None) -> Tensor:
    assert counts is not None
    return counts


def _each(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 3 else weight[None]


def _split(rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return the rows of each matrix, as views where ``rows`` are contiguous."""
    parts: tuple[Tensor, ...] = rows.reshape(-1, rows.shape[-1]).split(counts)
    return parts
