"""Megatron's linear layers on the CPU: what tensor_parallel/layers.py does, with the GEMMs of ``gemm.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron.runtime.cpu.gemm import gemm


class _Linear(torch.autograd.Function):
    """y = x wᵀ + b, where x may be split along its first dimension over tp (sequence parallelism)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        whole = x
        if sequence_parallel:
            whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
            dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs none
        ctx.shape = whole.shape
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.group = allreduce_dgrad, sequence_parallel, group
        out = gemm(whole.flatten(0, -2), weight)
        if bias is not None:
            out += bias
        return out.view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = gemm(grad, weight.t()).view(ctx.shape)
            if ctx.allreduce_dgrad:
                dist.all_reduce(grad_x, group=ctx.group)
            elif ctx.sequence_parallel:
                mine = grad_x.new_empty(ctx.shape[0] // ctx.group.size(), *ctx.shape[1:])
                dist.reduce_scatter_tensor(mine, grad_x, group=ctx.group)
                grad_x = mine
        if needs_weight:
            grad_weight = gemm(grad.t(), whole.flatten(0, -2).t())
        if needs_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: Any = None,
    wgrad_deferral_limit: Any = None,
    tp_group: dist.ProcessGroup | None = None,
    **_: Any,
) -> Tensor:
    """Replace ``linear_with_grad_accumulation_and_async_allreduce`` and, as only the gradients needed are computed,
    ``linear_with_frozen_weight``; same arguments. ``input`` [s, b, in] (s / tp under sequence parallelism)."""
    result: Tensor = _Linear.apply(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group)  # type: ignore[no-untyped-call]
    return result
