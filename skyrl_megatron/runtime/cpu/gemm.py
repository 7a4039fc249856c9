"""Matrix products of the path without Transformer Engine: which library computes them, and one per expert.

On the CPU, large fp32 products go to oneDNN where there are 512-bit registers: it uses them on every processor, MKL,
torch's default, on Intel's only (measured on an AMD Zen 5 core: 240 against 105 GFLOP/s). Without them MKL is faster
(on a Zen 3 core up to twice as fast, for products of 10 to 2,400 MFLOP).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
_WORTHWHILE = 1e8
"""Floating-point operations. oneDNN compiles a kernel for every shape, a millisecond each, and an expert hardly ever
gets the same number of tokens twice."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[n, k] × [m, k] → x @ weightᵀ, [n, m]. Any strides; not differentiable: for autograd functions."""
    if (
        _ONEDNN
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] > _WORTHWHILE / 2
    ):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result
    return torch.mm(x, weight.t())


class _GroupedProduct(torch.autograd.Function):
    """y[rows of expert e] = x[rows of expert e] @ w[e]ᵀ, with one autograd node for all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return torch.cat([product(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shares = grads[0].split(ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.cat([product(grad, matrix.t()) for grad, matrix in zip(shares, weight, strict=True)])
        if ctx.needs_input_grad[1]:
            # An expert without tokens gets zeros: a product over no rows.
            pairs = zip(shares, x.split(ctx.counts), strict=True)
            grad_weight = torch.stack([product(grad.t(), rows.t()) for grad, rows in pairs])
        return grad_x, grad_weight, None


def grouped_product(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """[n, k] sorted by expert × [E, m, k] → [n, m]; ``tokens_per_expert`` [E] sums to n. Differentiable.

    CUDA bfloat16 runs ``grouped_mm`` (one kernel; strides must be multiples of 16 bytes); everything else runs one
    product per expert.
    """
    aligned = (x.shape[1] * x.element_size()) % 16 == 0 and (weight.shape[1] * x.element_size()) % 16 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0]:
        ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    result: Tensor = _GroupedProduct.apply(x, weight, tokens_per_expert.tolist())
    return result
