"""The softmax kernel in Triton (:class:`~skyrl_megatron.runtime.softmax.Kernel`). Columns must be contiguous."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl_megatron.runtime.softmax import FLOOR

BLOCK = 4096
"""Columns per Triton block."""
_FLOOR = tl.constexpr(FLOOR)


def statistics(
    logits: Tensor, targets: Tensor, kept: Tensor | None, *, temperature: float, with_entropy: bool
) -> Tensor:
    """Reduce the columns of each token, [n, v], to four numbers, [4, n] fp32 (``Kernel.statistics``)."""
    numbers = torch.zeros(4, len(logits), dtype=torch.float32, device=logits.device)
    if not logits.shape[1]:
        numbers[0] = FLOOR
    elif len(logits):
        # Triton cannot launch a grid of 0 programs
        sizes = len(logits), logits.shape[1]
        _statistics[(len(logits),)](
            logits, logits.stride(0), targets, *_mask(kept), numbers, *sizes, temperature,
            HAS_KEPT=kept is not None, WITH_ENTROPY=with_entropy, BLOCK=_block(logits),
        )  # fmt: skip
    return numbers


def gradient(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    coefficients: Tensor,
    out: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
) -> None:
    """Write the gradient of the logits to ``out`` [n, v] (``Kernel.gradient``)."""
    if logits.numel():
        block, coefficients = _block(logits), coefficients.contiguous()
        sizes = len(logits), logits.shape[1]
        _gradient[(len(logits), triton.cdiv(sizes[1], block))](
            logits, logits.stride(0), targets, *_mask(kept), coefficients, out, out.stride(0), *sizes, temperature,
            HAS_KEPT=kept is not None, WITH_ENTROPY=with_entropy, BLOCK=block,
        )  # fmt: skip


def _mask(kept: Tensor | None) -> tuple[Any, int]:
    return (None, 0) if kept is None else (kept.view(torch.uint8), kept.stride(0))


def _block(logits: Tensor) -> int:
    # kernels add column numbers to a row's address
    assert logits.stride(1) == 1
    return min(BLOCK, int(triton.next_power_of_2(logits.shape[1])))


@triton.jit
def _load(logits, stride, kept, kept_stride, row, columns, v, HAS_KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = columns < v
    x = tl.load(logits + row * stride + columns, mask=inside, other=_FLOOR).to(tl.float32)
    if HAS_KEPT:
        x = tl.where(tl.load(kept + row * kept_stride + columns, mask=inside, other=0) != 0, x, _FLOOR)
    return x


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, stride, targets, kept, kept_stride, numbers, n, v, temperature,
    HAS_KEPT: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # int64: row · stride passes 2³¹ elements for 16,000 tokens of a vocabulary of 150,000
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    peak = tl.full((), _FLOOR, tl.float32)
    total = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)
    at_target = tl.zeros((), tl.float32)
    for start in range(0, v, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(logits, stride, kept, kept_stride, row, columns, v, HAS_KEPT)
        is_target = columns == target
        at_target += tl.sum(tl.where(is_target, x, 0.0))
        # one pass over memory: the sums so far are rescaled whenever a higher peak appears
        higher = tl.maximum(peak, tl.max(x))
        s = tl.where(is_target, _FLOOR, (x - higher) / temperature)
        weights = tl.exp(s)
        lower = (peak - higher) / temperature
        factor = tl.exp(lower)
        if WITH_ENTROPY:
            # before the total is rescaled: the moment shifts by the old sum
            moment = factor * (moment + lower * total) + tl.sum(weights * s)
        total = factor * total + tl.sum(weights)
        peak = higher
    tl.store(numbers + row, peak)
    tl.store(numbers + n + row, total)
    tl.store(numbers + 2 * n + row, moment)
    tl.store(numbers + 3 * n + row, at_target)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, stride, targets, kept, kept_stride, coefficients, out, out_stride, n, v, temperature,
    HAS_KEPT: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits, stride, kept, kept_stride, row, columns, v, HAS_KEPT)
    s = (x - tl.load(coefficients + row)) / temperature
    factor = tl.load(coefficients + n + row)
    if WITH_ENTROPY:
        factor += tl.load(coefficients + 2 * n + row) * s
    grad = tl.where(columns == tl.load(targets + row), tl.load(coefficients + 3 * n + row), tl.exp(s) * factor)
    tl.store(out + row * out_stride + columns, grad.to(out.dtype.element_ty), mask=columns < v)
