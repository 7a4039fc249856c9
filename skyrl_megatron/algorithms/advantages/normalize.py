"""Normalisation of a whole batch of advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked, masked_mean


@torch.no_grad()
def normalize_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Scale advantages [B, T] to mean 0 and deviation 1 over the tokens where ``mask`` [B, T] is 1; 0 elsewhere.

    ``algorithm.advantage_batch_normalize``. Padding does not count, so the result does not depend on it. The variance
    is the biased one and at least 1e-8; a mask without a token gives zeros.
    """
    advantages = keep_masked(advantages, mask)
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred * centred, mask).clamp(min=1e-8)
    return keep_masked(centred * variance.rsqrt(), mask)
