"""Supervised fine-tuning: the cross-entropy of the sampled tokens, whatever the advantage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, never, nothing_clipped
from skyrl_megatron.algorithms.metrics import ReducibleMetrics


@builtin_loss(corrected=False, uses_old=never)
def cross_entropy(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -log p of each token."""
    return -log_probs, nothing_clipped(mask)
