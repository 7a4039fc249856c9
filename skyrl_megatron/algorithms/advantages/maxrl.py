"""MaxRL: the deviation from the mean reward of the prompt's responses, in units of their mean size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import EPSILON, Groups, Index, over_response


@torch.no_grad()
def maxrl_scores(scores: Tensor, index: Index, epsilon: float = EPSILON) -> Tensor:
    """Return [B]: the deviation from the group's mean, divided by (mean |score| + ε); in a group of one the score.

    With rewards of 0 and above mean |score| is the mean, as MaxRL has it. A mean of rewards of both signs comes near 0
    or below it, where a division by it would blow advantages up or reverse them.
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    baseline = groups.mean(scores).masked_fill(alone, 0.0)
    scale = (groups.mean(scores.abs()) + epsilon).masked_fill(alone, 1.0)
    return ((scores.double() - baseline[groups.ids]) / scale[groups.ids]).to(scores.dtype)


def maxrl(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = EPSILON, **_: Any
) -> tuple[Tensor, Tensor]:
    """Spread :func:`maxrl_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = over_response(maxrl_scores, token_level_rewards, response_mask, index, epsilon)
    return advantages, advantages
