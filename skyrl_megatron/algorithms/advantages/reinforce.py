"""REINFORCE++ (arXiv:2501.03262): discounted rewards to come, normalised over the batch instead of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.gae import discounted_suffix_sum
from skyrl_megatron.algorithms.advantages.trained import TrainedTokens, mask_to_skip_by
from skyrl_megatron.algorithms.masked import masked_whiten


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    config: Any = None,
    loss_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Whiten the discounted sums of the rewards to come over the response.

    The sum at a token stops before the next token outside the mask: ``y_t = r_t + γ·mask_{t+1}·y_{t+1}``. Returns are
    the sums, advantages their whitened and masked form, both [B, T]. With ``loss_mask`` [B, T], unless
    ``config.skip_untrained_tokens`` is false, t + 1 is the next trained token, and trained tokens alone are whitened.
    Raises AlgorithmError when fewer than two tokens are valid; with ``loss_mask`` such advantages are 0.
    """
    counted = mask_to_skip_by(loss_mask, config)
    if counted is None:
        returns = _sums_up_to_gaps(token_level_rewards, response_mask, gamma)
        return masked_whiten(returns, response_mask) * response_mask, returns
    trained = TrainedTokens.unless_at_the_end(counted)
    if trained is None:
        returns = discounted_suffix_sum(token_level_rewards, gamma) * counted
    else:
        returns = trained.back(discounted_suffix_sum(trained.credit(token_level_rewards), gamma))
    if counted.sum() < 2:
        return torch.zeros_like(returns), returns
    return masked_whiten(returns, counted) * counted, returns


def _sums_up_to_gaps(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    sums = discounted_suffix_sum(token_level_rewards, gamma)
    rows, length = sums.shape
    end = length * torch.ones(rows, 1, dtype=torch.int64, device=sums.device)
    position = torch.arange(length, device=sums.device).expand(rows, -1)
    gaps = torch.cat([torch.where(response_mask > 0, end, position)[:, 1:], end], dim=1)
    stop = gaps.flip(1).cummin(dim=1).values.flip(1)  # first token after t that is outside the mask, or T
    beyond = torch.cat([sums, sums.new_zeros(rows, 1)], dim=1).gather(1, stop)
    return sums - beyond * (gamma ** (stop - position).double()).to(sums.dtype)
