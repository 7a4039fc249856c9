"""GRPO: rewards relative to those of the other responses to the same prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import EPSILON, Groups, Index, over_response


@torch.no_grad()
def grpo_scores(scores: Tensor, index: Index, norm_by_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """Return the deviation from the group's mean [B], divided by (unbiased std + ε) if ``norm_by_std``.

    A group of one has mean 0 and std 1. arXiv:2402.03300, section 4.1.2; without std arXiv:2503.20783 (Dr. GRPO).
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    deviations = scores.double() - groups.mean(scores).masked_fill(alone, 0.0)[groups.ids]
    if norm_by_std:
        std = groups.std(deviations.masked_fill(alone[groups.ids], 0.0)).masked_fill(alone, 1.0)
        deviations = deviations / (std + epsilon)[groups.ids]
    return deviations.to(scores.dtype)


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = EPSILON,
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Spread :func:`grpo_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = over_response(grpo_scores, token_level_rewards, response_mask, index, grpo_norm_by_std, epsilon)
    return advantages, advantages
