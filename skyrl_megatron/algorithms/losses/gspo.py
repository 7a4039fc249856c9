"""GSPO (arXiv:2507.18071), in its form GSPO-token: PPO's clip on the ratio of a whole sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss
from skyrl_megatron.algorithms.losses.ppo import clipped_surrogate
from skyrl_megatron.algorithms.masked import masked_mean
from skyrl_megatron.algorithms.metrics import ReducibleMetrics


@builtin_loss()
def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss with one ratio a sequence, the geometric mean of r (equations 14 and 15).

    The ratio's value is the sequence's, its gradient each token's own. Meant for ``loss_reduction=sequence_mean``.
    """
    sequence = masked_mean(log_probs - old_log_probs, mask, dim=1)[:, None]
    ratio = (log_probs - log_probs.detach() + sequence.detach()).clamp(max=10.0).exp()
    return clipped_surrogate(ratio, advantages, config, mask)
