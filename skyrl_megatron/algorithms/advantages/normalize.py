"""Shift and scale of a whole batch of advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked, masked_mean


@torch.no_grad()
def normalize_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B, T] with mean 0 and deviation 1 over the tokens where ``mask`` [B, T] is 1, and 0 elsewhere.

    ``algorithm.advantage_batch_normalize``. Padding has no say, so the result does not depend on how far a batch is
    padded. The variance is the biased one and at least 1e-8; a mask without a token gives zeros.
    """
    advantages = keep_masked(advantages, mask)
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred * centred, mask).clamp(min=1e-8)
    return keep_masked(centred * variance.rsqrt(), mask)
