"""What an optimizer step of the critic minimises: the value loss, averaged over the tokens of the whole step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.losses import ppo_critic_loss
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.reduction import StepTotals, micro_batch_share, row_weights, step_totals, weighted_sum


class CriticObjective:
    """The value loss of ``config`` (an AlgorithmConfig): :func:`ppo_critic_loss`, a mean over tokens.

    Used as :class:`~skyrl_megatron.algorithms.objective.PolicyObjective` is. ``loss_reduction`` is the policy's: a
    value is regressed at each token, whichever sequence it stands in.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def totals(self, loss_mask: Tensor, **_: Any) -> StepTotals:
        """Count a shard of the mini-batch, [B, T]; add the counts up over shards before the step."""
        return step_totals(loss_mask)

    def weight(self, totals: StepTotals) -> float:
        """Return the denominator of the mean."""
        return totals.tokens

    def __call__(
        self, totals: StepTotals, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, ReducibleMetrics]:
        """Return the loss of a micro-batch, a scalar to call ``backward`` on, and its metrics; all tensors [B, T].

        Metrics: ``critic_loss``, ``values_mean`` and ``values_clipfrac``, the share of tokens whose loss is clipped.
        """
        per_token, measured = ppo_critic_loss(values, old_values, returns, self.config, loss_mask)
        loss = weighted_sum(per_token, loss_mask, row_weights(loss_mask, totals))
        share = micro_batch_share(loss_mask, totals)
        return loss, {
            "critic_loss": Mean(loss.detach().double(), share),
            "values_mean": token_mean(values.detach(), loss_mask),
            "values_clipfrac": measured["clip_ratio"],
        }
