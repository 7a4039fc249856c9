"""GDPO, an estimator for several rewards: each is normalised in its group before they are added (arXiv:2601.05242).

GRPO normalises the sum of the rewards, so different combinations of rewards can get the same advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.estimator_state import EstimatorState
from skyrl_megatron.algorithms.groups import Groups, Index
from skyrl_megatron.errors import AlgorithmError

if TYPE_CHECKING:
    from skyrl_megatron.config import AlgorithmConfig


class SeparateRewards(EstimatorState):
    """Lets a batch have the rewards of ``algorithm.gdpo_weights`` as columns."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        super().__init__(algorithm)
        self.reward_names = tuple(algorithm.gdpo_weights)


@torch.no_grad()
def gdpo_scores(
    parts: Tensor, weights: Tensor, index: Index, trained: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor:
    """Return [B]: Σ_k w_k · (r_k − group's mean) / (group's std + ε), less its mean and divided by its (std + ε) over
    the batch.

    ``parts`` [B, R]: rewards r_k, ``weights`` [R]. Standard deviations are unbiased. A reward that is constant in a
    group adds 0, and so does a group of one. Only ``trained`` [B] bool sequences count in the batch; others get 0.
    """
    groups = Groups(index, len(parts), parts.device)
    total = torch.zeros(len(parts), dtype=torch.float64, device=parts.device)
    # Sums of float32 rewards are exact in float64. A reward that is constant in a group then deviates by
    # exactly 0; a rounding error of 1e-8 would become an advantage, as it is divided by ε.
    for column, weight in zip(parts.double().unbind(1), weights.tolist(), strict=True):
        deviations = column - groups.mean(column)[groups.ids]
        total += weight * deviations / (groups.std(deviations) + epsilon)[groups.ids]
    counted = torch.ones(len(parts), dtype=torch.bool, device=parts.device) if trained is None else trained
    kept = total[counted]
    # the unbiased deviation of one number is NaN
    if len(kept) < 2:
        return torch.zeros_like(total)
    return torch.where(counted, (total - kept.mean()) / (kept.std() + epsilon), 0.0)


def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    config: Any = None,
    reward_parts: Tensor | None = None,
    loss_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Spread :func:`gdpo_scores` of ``reward_parts`` [B, R] over the response: [B, T], one tensor for both.

    The weights are those of ``config.gdpo_weights``, in its order. Raises AlgorithmError if they do not match.
    """
    weights = list((getattr(config, "gdpo_weights", None) or {}).values())
    if reward_parts is None or reward_parts.shape != (len(token_level_rewards), len(weights)) or not weights:
        raise AlgorithmError(
            "the estimator gdpo needs reward_parts [B, R] with one column for each of trainer.algorithm.gdpo_weights, "
            f"which has {len(weights)}; got {'none' if reward_parts is None else list(reward_parts.shape)}"
        )
    # samples that train nothing must not shift the statistics of the batch
    trained = None if loss_mask is None else (loss_mask > 0).any(dim=1)
    scores = gdpo_scores(reward_parts, reward_parts.new_tensor(weights, dtype=torch.float64), index, trained)
    advantages = scores[:, None].to(token_level_rewards.dtype) * response_mask.to(token_level_rewards.dtype)
    return advantages, advantages
