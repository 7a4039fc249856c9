"""Loss of the critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.checks import check_token_tensors
from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean


def ppo_critic_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, config: Any, loss_mask: Tensor | None = None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return ½·max((V - R)², (clip(V) - R)²) of each token [B, T], 0 where masked, and the metric ``clip_ratio``.

    clip(V) keeps V within ``config.value_clip`` of ``old_values``; None clips nothing. Per token, like the policy
    losses: averaged in ``reduction.py``. Raises AlgorithmError for shapes that differ.
    """
    check_token_tensors("values", values=values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    mask = torch.ones_like(values) if loss_mask is None else loss_mask
    values, old_values, returns = (keep_masked(tensor, mask) for tensor in (values, old_values, returns))
    free = (values - returns).square()
    limit = config.value_clip
    near = values if limit is None else old_values + (values - old_values).clamp(-limit, limit)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(free, clipped), {"clip_ratio": token_mean(clipped > free, mask)}
