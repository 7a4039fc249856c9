"""DPPO (arXiv:2602.04879): a trust region on the divergence from the engine's policy, in place of the clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, never, require_rollout
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio
from skyrl_megatron.errors import AlgorithmError


@builtin_loss(uses_old=never)
def dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A, and 0 for tokens that are too far from the engine's policy and would move further away.

    r is against the engine's log-probs. How far is measured on the two outcomes {token, not token}, by total variation
    |p - q| (``dppo_type=binary_tv``, equation 13) or KL(q ‖ p) (``binary_kl``, equation 14). A token is 0 when its
    probability rose, its advantage is positive, and the distance is above ``delta_high``; or all three mirrored, with
    ``delta_low``.
    """
    rollout = require_rollout("dppo", rollout)
    with torch.no_grad():
        here, there = log_probs.exp(), rollout.exp()
        rise = here - there
        match config.dppo.dppo_type:
            case "binary_tv":
                distance = rise.abs()
            case "binary_kl":
                rest = torch.log((1 - there + 1e-8) / (1 - here + 1e-8))
                distance = there * (rollout - log_probs) + (1 - there) * rest
            case other:
                raise AlgorithmError(f"dppo.dppo_type={other!r}: choose binary_tv or binary_kl")
        too_high = (advantages > 0) & (rise > 0) & (distance > config.dppo.delta_high)
        too_low = (advantages < 0) & (rise < 0) & (distance > config.dppo.delta_low)
        dropped = too_high | too_low
    ratio = clamped_ratio(log_probs - rollout)
    return torch.where(dropped, 0.0, -ratio * advantages), {"clip_ratio": token_mean(dropped, mask)}
