"""RLOO (arXiv:2402.14740): the mean of the other responses to the prompt is the baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import Groups, Index, over_response


@torch.no_grad()
def rloo_scores(scores: Tensor, index: Index) -> Tensor:
    """Return the deviation from the mean of the other responses, (s - mean)·n/(n-1); 0 in a group of one. [B]."""
    groups = Groups(index, len(scores), scores.device)
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp(min=1) * (groups.sizes > 1)
    deviations = scores.double() - groups.mean(scores)[groups.ids]
    return (deviations * leave_one_out[groups.ids]).to(scores.dtype)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Index, **_: Any) -> tuple[Tensor, Tensor]:
    """Spread :func:`rloo_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = over_response(rloo_scores, token_level_rewards, response_mask, index)
    return advantages, advantages
