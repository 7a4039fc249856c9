"""GEMMs without Transformer Engine: the library that computes them, and grouped ones, one matrix per expert.

On a CPU with 512-bit registers large fp32 GEMMs go to oneDNN, which uses them on every processor; MKL, torch's
default, uses them on Intel's only (on an AMD Zen 5 core: 240 against 105 GFLOP/s). Without such registers MKL is
faster (on a Zen 3 core up to twice as fast, for GEMMs of 10 to 2,400 MFLOP).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
# Packs hardly ever have the same number of tokens twice: the 1,024 kernels that oneDNN and torch's layer above it keep
# by default make a rank grow by 20 MB a step. Both read the environment at the first product.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "64")
_WORTHWHILE = 1e8
"""Floating-point operations. oneDNN compiles a kernel for every shape, a millisecond each, and an expert hardly ever
gets the same number of tokens twice."""


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weightᵀ: [n, k] × [m, k] → [n, m], any strides. Not differentiable: for autograd functions."""
    if (
        _ONEDNN
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] > _WORTHWHILE / 2
    ):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result
    return torch.mm(x, weight.t())


class _GroupedGemm(torch.autograd.Function):
    """y[rows of expert e] = x[rows of expert e] @ w[e]ᵀ, with one autograd node for all experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        # Beside a frozen weight the input need not be kept.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts = counts
        return torch.cat([gemm(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shares = grads[0].split(ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.cat([gemm(grad, matrix.t()) for grad, matrix in zip(shares, weight, strict=True)])
        if ctx.needs_input_grad[1]:
            # An expert without tokens gets zeros: a GEMM over no rows.
            pairs = zip(shares, x.split(ctx.counts), strict=True)
            grad_weight = torch.stack([gemm(grad.t(), rows.t()) for grad, rows in pairs])
        return grad_x, grad_weight, None


def grouped_gemm(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Compute rows sorted by expert, [n, k], times each expert's matrix, [E, m, k] → [n, m]; differentiable.

    ``tokens_per_expert``: [E], sums to n. CUDA bfloat16 runs ``grouped_mm`` (one kernel; strides must be multiples of
    16 bytes); everything else runs one GEMM per expert.
    """
    aligned = (x.shape[1] * x.element_size()) % 16 == 0 and (weight.shape[1] * x.element_size()) % 16 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0]:
        ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    result: Tensor = _GroupedGemm.apply(x, weight, tokens_per_expert.tolist())  # type: ignore[no-untyped-call]
    return result
