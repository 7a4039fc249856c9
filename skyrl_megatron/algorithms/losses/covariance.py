"""Clip-Cov and KL-Cov: tokens of high covariance between advantage and log-prob are held back (arXiv:2505.22617).

The covariance of a token is its advantage minus the mean advantage, times its log-probability minus the mean one, with
means over the micro-batch. These losses therefore depend on how a batch is cut.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, nothing_clipped
from skyrl_megatron.algorithms.losses.ppo import clipped_surrogate
from skyrl_megatron.algorithms.masked import masked_mean
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean

_picks = torch.Generator().manual_seed(0)


def seed_random_picks(*parts: int | str) -> None:
    """Seed the random choice of tokens that ``clip_cov`` makes.

    All ranks that hold the same tokens (tp, cp, pp) must choose the same: call this before each micro-batch with parts
    that they share, such as (seed, step, dp rank, number of the micro-batch).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    _picks.manual_seed(int.from_bytes(digest))


@torch.no_grad()
def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return what each token contributes to the covariance of advantage and log-probability, [B, T]."""
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


@builtin_loss(corrected=False, depends_on_cut=True)
def clip_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss, set to 0 for a few tokens of high covariance.

    They are a random choice of max(⌊clip_ratio · tokens⌋, 1) from the tokens that PPO does not clip and whose
    covariance lies between ``clip_cov_lb`` and ``clip_cov_ub``. Metric ``clip_ratio``: the share of tokens chosen.
    """
    ratio = (log_probs - old_log_probs).exp()
    loss, _ = clipped_surrogate(ratio, advantages, config, mask)
    with torch.no_grad():
        cov, unclipped = covariance(log_probs, advantages, mask), loss <= -ratio * advantages
        inside = (cov > config.clip_cov.clip_cov_lb) & (cov < config.clip_cov.clip_cov_ub)
        candidates = (inside & unclipped & (mask > 0)).flatten().nonzero().squeeze(1)
        count = max(int(config.clip_cov.clip_ratio * int((mask > 0).sum())), 1)
        order = torch.randperm(len(candidates), generator=_picks)[:count].to(candidates.device)
        chosen = torch.zeros_like(mask, dtype=torch.bool).flatten().index_fill(0, candidates[order], True)
        chosen = chosen.view_as(mask)
    return torch.where(chosen, 0.0, loss), {"clip_ratio": token_mean(chosen, mask)}


@builtin_loss(corrected=False, depends_on_cut=True)
def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A, plus ``ppo_kl_coef``·|log r| for the tokens of largest covariance.

    These are max(⌊kl_cov_frac · tokens⌋, 1) tokens.
    """
    difference = log_probs - old_log_probs
    loss = -difference.exp() * advantages
    valid = (mask > 0).flatten()
    tokens = int(valid.sum())
    cov = covariance(log_probs, advantages, mask).flatten().masked_fill(~valid, -torch.inf)
    count = min(max(int(config.kl_cov.kl_cov_frac * tokens), 1), tokens)
    chosen = torch.zeros_like(valid).index_fill(0, cov.topk(count).indices, True).view_as(mask)
    penalty = config.kl_cov.ppo_kl_coef * difference.abs()
    return torch.where(chosen, loss + penalty, loss), nothing_clipped(mask)
