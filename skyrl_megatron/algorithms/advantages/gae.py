"""Estimators that carry reward back through time: GAE and REINFORCE++.

Both are a linear recurrence from the last token to the first, ``y_t = x_t + f·y_{t+1}``. Instead of T steps on slices
of width one, :func:`discounted_suffix_sum` multiplies blocks of tokens by a triangular matrix of powers of f.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import masked_mean, masked_var, masked_whiten
from skyrl_megatron.errors import AlgorithmError

BLOCK = 32


def discounted_suffix_sum(x: Tensor, factor: float) -> Tensor:
    """``y_t = Σ_{s≥t} factor^(s-t) · x_s`` along the last dimension of x [B, T], 0 ≤ factor ≤ 1; new tensor [B, T].

    Within blocks of tokens by one matrix product, then the same over the sums of the blocks: log(T) products.
    """
    rows, length = x.shape
    size = min(BLOCK, length)
    steps = torch.arange(size, device=x.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]  # from the column's token forward to the row's
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0).to(x.dtype)
    padding = -length % size
    padded = torch.nn.functional.pad(x, (padding, 0)) if padding else x
    within = (padded.reshape(-1, size) @ powers).view(rows, -1, size)
    if within.shape[1] > 1:
        totals = discounted_suffix_sum(within[:, :, 0], factor**size)
        reach = (factor ** (size - steps)).to(x.dtype)  # from the first token of the next block
        within[:, :-1].addcmul_(totals[:, 1:, None], reach)
    return within.view(rows, -1)[:, padding:]


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438), whitened over the response; returns are A + V before that.

    δ_t = r_t + γV_{t+1} - V_t and A_t = δ_t + γλA_{t+1}, over all of T: padding stands at the left, where nothing
    flows from. Advantages [B, T] are not masked again; entries outside the mask mean nothing.
    Raises AlgorithmError without ``values`` [B, T], or when fewer than two tokens are valid.
    """
    if values is None:
        raise AlgorithmError(
            "the estimator gae needs values: set trainer.critic.model.path, or take another estimator"
        )
    deltas = token_level_rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    advantages = discounted_suffix_sum(deltas, gamma * lambd)
    returns = torch.add(advantages, values, out=deltas)
    scale = torch.rsqrt(masked_var(advantages, response_mask) + 1e-8)
    return advantages.sub_(masked_mean(advantages, response_mask)).mul_(scale), returns


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): discounted sums of the rewards to come, whitened over the response.

    The sum at a token stops before the next token outside the mask: ``y_t = r_t + γ·mask_{t+1}·y_{t+1}``. Returns are
    the sums, advantages their whitened and masked form, both [B, T].
    Raises AlgorithmError when fewer than two tokens are valid.
    """
    sums = discounted_suffix_sum(token_level_rewards, gamma)
    rows, length = sums.shape
    end = length * torch.ones(rows, 1, dtype=torch.int64, device=sums.device)
    position = torch.arange(length, device=sums.device).expand(rows, -1)
    gaps = torch.cat([torch.where(response_mask > 0, end, position)[:, 1:], end], dim=1)
    stop = gaps.flip(1).cummin(dim=1).values.flip(1)  # first token after t that is outside the mask, or T
    beyond = torch.cat([sums, sums.new_zeros(rows, 1)], dim=1).gather(1, stop)
    returns = sums - beyond * (gamma ** (stop - position).double()).to(sums.dtype)
    return masked_whiten(returns, response_mask) * response_mask, returns
