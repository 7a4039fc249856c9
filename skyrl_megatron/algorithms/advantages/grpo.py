"""Estimators that compare the total reward of a response with those of the other responses to its prompt.

Each is first a function of scores, one number a sequence ([B] → [B]): that is all the information there is, and the
cheap form to keep. The registered form sums token rewards, and spreads the result over the response ([B, T], written
once: the returned advantages and returns are the same tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import Groups

type Index = Sequence[object] | np.ndarray | Tensor

EPSILON = 1e-6


@torch.no_grad()
def grpo_scores(scores: Tensor, index: Index, norm_by_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """GRPO: deviation from the group's mean, divided by (its unbiased std + ε) if ``norm_by_std``. [B] → [B].

    A group of one has mean 0 and std 1. arXiv:2402.03300, section 4.1.2; without std arXiv:2503.20783 (Dr. GRPO).
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    deviations = scores.double() - groups.mean(scores).masked_fill(alone, 0.0)[groups.ids]
    if norm_by_std:
        std = groups.std(deviations.masked_fill(alone[groups.ids], 0.0)).masked_fill(alone, 1.0)
        deviations = deviations / (std + epsilon)[groups.ids]
    return deviations.to(scores.dtype)


@torch.no_grad()
def rloo_scores(scores: Tensor, index: Index) -> Tensor:
    """RLOO: deviation from the mean of the other responses, (s - mean)·n/(n-1); 0 in a group of one. [B] → [B].

    arXiv:2402.14740.
    """
    groups = Groups(index, len(scores), scores.device)
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp(min=1) * (groups.sizes > 1)
    deviations = scores.double() - groups.mean(scores)[groups.ids]
    return (deviations * leave_one_out[groups.ids]).to(scores.dtype)


@torch.no_grad()
def maxrl_scores(scores: Tensor, index: Index, epsilon: float = EPSILON) -> Tensor:
    """MaxRL: deviation from the group's mean, divided by (that mean + ε). [B] → [B].

    In a group of one the score itself.
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    means = groups.mean(scores)
    baseline, scale = means.masked_fill(alone, 0.0), (means + epsilon).masked_fill(alone, 1.0)
    return ((scores.double() - baseline[groups.ids]) / scale[groups.ids]).to(scores.dtype)


def _spread(scores: Callable[..., Tensor], rewards: Tensor, mask: Tensor, *args: Any, **options: Any) -> Tensor:
    """Scores of summed rewards, over the tokens of the response: [B, T] of the rewards' dtype."""
    advantages = scores(rewards.sum(dim=1), *args, **options)
    return advantages[:, None] * (mask if mask.dtype == rewards.dtype else mask.to(rewards.dtype))


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = EPSILON,
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`grpo_scores` of the summed rewards, over the response. Advantages and returns [B, T], one tensor."""
    spread = _spread(grpo_scores, token_level_rewards, response_mask, index, grpo_norm_by_std, epsilon)
    return spread, spread


def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Index, **_: Any) -> tuple[Tensor, Tensor]:
    """:func:`rloo_scores` of the summed rewards, over the response. Advantages and returns [B, T], one tensor."""
    spread = _spread(rloo_scores, token_level_rewards, response_mask, index)
    return spread, spread


def maxrl(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = EPSILON, **_: Any
) -> tuple[Tensor, Tensor]:
    """:func:`maxrl_scores` of the summed rewards, over the response. Advantages and returns [B, T], one tensor."""
    spread = _spread(maxrl_scores, token_level_rewards, response_mask, index, epsilon)
    return spread, spread
