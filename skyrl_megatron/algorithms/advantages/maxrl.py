"""MaxRL: the deviation from the mean reward of the prompt's responses, in units of that mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import EPSILON, Groups, Index, over_response


@torch.no_grad()
def maxrl_scores(scores: Tensor, index: Index, epsilon: float = EPSILON) -> Tensor:
    """Return the deviation from the group's mean, divided by (mean + ε); in a group of one the score. [B] → [B]."""
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    means = groups.mean(scores)
    baseline, scale = means.masked_fill(alone, 0.0), (means + epsilon).masked_fill(alone, 1.0)
    return ((scores.double() - baseline[groups.ids]) / scale[groups.ids]).to(scores.dtype)


def maxrl(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = EPSILON, **_: Any
) -> tuple[Tensor, Tensor]:
    """Spread :func:`maxrl_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = over_response(maxrl_scores, token_level_rewards, response_mask, index, epsilon)
    return advantages, advantages
