"""GAE: generalised advantage estimation (arXiv:1506.02438), the estimator that needs a critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import masked_mean, masked_var
from skyrl_megatron.errors import AlgorithmError

BLOCK = 32


def discounted_suffix_sum(x: Tensor, factor: float) -> Tensor:
    """Return ``y_t = Σ_{s≥t} factor^(s-t) · x_s`` for x [B, T] and 0 ≤ factor ≤ 1, as a new tensor [B, T].

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
    """Estimate advantages from the critic's values and whiten them over the response; returns are A + V before that.

    δ_t = r_t + γV_{t+1} - V_t and A_t = δ_t + γλA_{t+1}, over all of T: padding stands at the left, where nothing
    flows from. Advantages [B, T] are not masked again: ignore entries outside the mask.
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
