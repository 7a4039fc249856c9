"""PPO: the importance ratio is clipped (``regular``), for negative advantages twice (``dual_clip``).

Everywhere r = exp(log_probs - old_log_probs), A the advantage, clip(r) = r limited to [1 - eps_clip_low,
1 + eps_clip_high]; the metric ``clip_ratio`` is the share of tokens whose loss the limit changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: Any, mask: Tensor) -> tuple[Tensor, ReducibleMetrics]:
    """Return -min(r·A, clip(r)·A) of each token [B, T], and the metric ``clip_ratio``."""
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    return torch.maximum(free, clipped), {"clip_ratio": token_mean(clipped > free, mask)}


@builtin_loss()
def regular(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -min(r·A, clip(r)·A) of each token. arXiv:1707.06347, equation 7."""
    return clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, mask)


@builtin_loss()
def dual_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss, limited to -c·A where A < 0, with c = ``clip_ratio_c``. arXiv:1912.09729."""
    loss, metrics = clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, mask)
    limited = torch.minimum(loss, -config.clip_ratio_c * advantages)
    return torch.where(advantages < 0, limited, loss), metrics
