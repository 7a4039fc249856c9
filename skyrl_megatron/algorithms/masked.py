"""Means and variances over the valid tokens of a padded tensor. Masks are [B, T] (or any shape), 1 where valid.

What stands outside a mask has weight 0, but must be finite; :func:`keep_masked` clears what is not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_megatron.errors import AlgorithmError

BLOCK = 1 << 18


def keep_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Set ``values`` to exactly 0 where ``mask`` is 0; NaN there does not survive, as it would in a product."""
    return values if mask is None else torch.where(mask > 0, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, map: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Return Σ map(values)·mask, scalar. In blocks: to allocate a second such tensor costs more than the sum."""
    blocks = zip(torch.split(values.flatten(), BLOCK), torch.split(mask.flatten(), BLOCK), strict=True)
    return torch.stack([(map(part) * valid).sum() for part, valid in blocks]).sum()


def masked_mean(values: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean over the valid entries, of everything or along ``dim``; 0 where nothing is valid."""
    if mask is None:
        return values.mean() if dim is None else values.mean(dim)
    if dim is None:
        return masked_sum(values, mask) / mask.sum().clamp(min=1)
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_token_mean(loss: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of a per-token loss [B, T] over its valid tokens: the scalar that a custom loss may return.

    For losses that wrap a built-in one, whose result is per token.
    """
    return masked_mean(loss, mask)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance over the valid entries; ``unbiased`` divides by their number minus one.

    Raises AlgorithmError (a ValueError) when there are fewer than two valid entries for an unbiased variance.
    """
    count = mask.sum()
    if unbiased and count < 2:
        raise AlgorithmError(f"the variance needs at least 2 valid tokens, the mask has {int(count)}")
    mean = masked_mean(values, mask)
    squares = masked_sum(values, mask, lambda part: (part - mean).square())
    return squares / (count - 1 if unbiased else count.clamp(min=1))


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale ``values`` to variance 1 over the valid entries, and to mean 0 when ``shift_mean``.

    Entries outside the mask go through the same map: ignore them. Raises as :func:`masked_var` does.
    """
    mean = masked_mean(values, mask)
    scale = torch.rsqrt(masked_var(values, mask) + 1e-8)
    return (values - mean) * scale if shift_mean else (values - mean) * scale + mean
