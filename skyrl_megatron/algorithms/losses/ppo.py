"""Losses that clip the importance ratio: the PPO surrogate and its relatives.

Everywhere r = exp(log_probs - old_log_probs), A the advantage, clip(r) = r limited to [1 - eps_clip_low,
1 + eps_clip_high]; the metric ``clip_ratio`` is the share of tokens whose loss the limit changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss
from skyrl_megatron.algorithms.masked import masked_mean
from skyrl_megatron.algorithms.metrics import Metrics, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: Any, mask: Tensor) -> tuple[Tensor, Metrics]:
    """-min(r·A, clip(r)·A) of each token."""
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    return torch.maximum(free, clipped), {"clip_ratio": token_mean(clipped > free, mask)}


@builtin_loss()
def regular(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """PPO: -min(r·A, clip(r)·A). arXiv:1707.06347, equation 7."""
    return clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, loss_mask)


@builtin_loss()
def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """PPO, with the loss of tokens of negative advantage limited to -c·A, c = ``clip_ratio_c``. arXiv:1912.09729."""
    loss, metrics = clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, loss_mask)
    limited = torch.minimum(loss, -config.clip_ratio_c * advantages)
    return torch.where(advantages < 0, limited, loss), metrics


@builtin_loss()
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """GSPO-token (arXiv:2507.18071, equations 14 and 15): PPO with one ratio a sequence, the geometric mean of r.

    The ratio's value is the sequence's, its gradient each token's own. Meant for ``loss_reduction=sequence_mean``.
    """
    sequence = masked_mean(log_probs - old_log_probs, loss_mask, dim=1)[:, None]
    ratio = (log_probs - log_probs.detach() + sequence.detach()).clamp(max=10.0).exp()
    return clipped_surrogate(ratio, advantages, config, loss_mask)
