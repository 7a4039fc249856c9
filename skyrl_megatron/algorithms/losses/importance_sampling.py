"""Losses weighted by a plain importance ratio: against the trainer's log-probs, or the engine's (``rollout_is``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, never, require_rollout
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio


@builtin_loss(corrected=False)
def importance_sampling(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A with r = exp(log_probs - old_log_probs), neither clamped nor corrected.

    Metric ``importance_ratio``: mean r.
    """
    ratio = (log_probs - old_log_probs).exp()
    return -ratio * advantages, {"importance_ratio": token_mean(ratio, mask)}


@builtin_loss(uses_old=never)
def rollout_is(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return REINFORCE's loss weighted by r against the engine's log-probs; 0 where r leaves the PPO clip range."""
    ratio = clamped_ratio(log_probs - require_rollout("rollout_is", rollout))
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    weight = torch.where(inside, ratio, 0.0).detach()
    return -weight * advantages * log_probs, {"clip_ratio": token_mean(~inside, mask)}
