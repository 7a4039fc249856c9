"""What an optimizer step minimises: policy loss + KL to the reference - entropy, each averaged over the whole step.

How the training engine uses it, per optimizer step::

    objective = PolicyObjective(config)                       # at each step: the registry may have changed
    mine = objective.totals(loss_mask, old_log_probs=…, rollout_log_probs=…, uids=…)   # this rank's shard
    totals = <sum of everybody's `mine` over the dp ranks>    # StepTotals adds up
    for each micro-batch:
        loss, metrics = objective(totals, log_probs, advantages, loss_mask, …)
        loss.backward()                                       # gradients are summed over micro-batches and dp ranks
    metrics: merge_metrics over micro-batches, pack_metrics + two all-reduces over dp, metric_values

The loss of a micro-batch is its share of the step's loss; the shares of all micro-batches and ranks add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from skyrl_megatron.algorithms.checks import check_token_tensors
from skyrl_megatron.algorithms.distillation import divergence
from skyrl_megatron.algorithms.kl import compute_approx_kl
from skyrl_megatron.algorithms.losses import BUILT_IN, PolicyLossRegistry
from skyrl_megatron.algorithms.losses.builtin import BuiltinLoss
from skyrl_megatron.algorithms.losses.custom import call_policy_loss, warn_once
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics
from skyrl_megatron.algorithms.off_policy import effective_mask
from skyrl_megatron.algorithms.reduction import StepTotals, micro_batch_share, row_weights, step_totals, weighted_sum
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.errors import AlgorithmError


class Objective(Protocol):
    """What the training engine asks of an objective, a policy's or a critic's, besides the loss of a micro-batch."""

    def totals(
        self,
        loss_mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        uids: Sequence[str] | None = None,
    ) -> StepTotals:
        """Count a shard of the mini-batch."""
        ...

    def weight(self, totals: StepTotals) -> float:
        """Return the denominator of the mean over what ``totals`` counted."""
        ...


class PolicyObjective:
    """The objective that ``config`` (an AlgorithmConfig) describes, with the loss that the registry holds now.

    Raises AlgorithmError when the loss is not registered. Warns once when loss and gradient will depend on how a batch
    is cut into micro-batches.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.name = str(config.policy_loss_type)
        self.function = PolicyLossRegistry.get(self.name)
        self.builtin = cast(BuiltinLoss, self.function) if self.function in BUILT_IN.values() else None
        self.reduction = str(config.loss_reduction)
        corrected = self.builtin is not None and self.builtin.corrected
        self.correction = getattr(config, "off_policy_correction", None) if corrected else None
        if self.builtin is not None and self.builtin.depends_on_cut:
            warn_once(
                f"the policy loss {self.name!r} uses statistics of its micro-batch: loss and gradient depend on how a"
                " batch is cut into micro-batches and data-parallel ranks"
            )

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether anything reads the trainer's log-probs before the update: else their forward pass is skipped."""
        return correction_enabled(self.correction) or self.builtin is None or self.builtin.uses_old(self.config)

    @property
    def compares_top(self) -> bool:
        """Whether the policy's distributions are compared with a teacher's, token for token."""
        wanted = getattr(self.config, "distillation", None)
        return wanted is not None and wanted.loss_coef > 0

    def effective_mask(
        self, loss_mask: Tensor, old_log_probs: Tensor | None = None, rollout_log_probs: Tensor | None = None
    ) -> Tensor:
        """Return the loss mask [B, T] without the tokens that the off-policy masks of this loss drop."""
        return effective_mask(old_log_probs, rollout_log_probs, loss_mask, self.correction)

    def totals(
        self,
        loss_mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        uids: Sequence[str] | None = None,
    ) -> StepTotals:
        """Count a shard of the mini-batch, [B, T] each; add the counts up over shards before the step."""
        mask = self.effective_mask(loss_mask, old_log_probs, rollout_log_probs)
        return step_totals(mask, self.reduction, uids)

    def weight(self, totals: StepTotals) -> float:
        """Return the denominator of the mean over what ``totals`` counted."""
        if self.reduction == "prompt_mean":
            return len(totals.prompt_tokens)
        return totals.tokens if self.reduction == "token_mean" else totals.rows

    def __call__(
        self,
        totals: StepTotals,
        log_probs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        top_log_probs: tuple[Tensor, Tensor] | None = None,
        uids: Sequence[str] | None = None,
    ) -> tuple[Tensor, ReducibleMetrics]:
        """Return the loss of a micro-batch, a scalar to call ``backward`` on, and its metrics; all tensors [B, T].

        ``ref_log_probs`` is needed for ``use_kl_loss``, ``entropy`` (nats, differentiable) for ``use_entropy_loss``;
        given without these, they are measured only. ``top_log_probs``: the policy's, differentiable, and the teacher's
        of the teacher's likeliest tokens, [B, T, K] each, for ``distillation.loss_coef``. Metrics: ``final_loss``,
        ``policy_loss``, ``policy_kl``, ``policy_entropy``, the step's values as shares, and ``loss_metrics/…`` of the
        policy loss.
        """
        config = self.config
        given = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
        others = {"ref_log_probs": ref_log_probs, "entropy": entropy, "loss_mask": loss_mask, "advantages": advantages}
        check_token_tensors("log_probs", log_probs=log_probs, **given, **others)
        mask = self.effective_mask(loss_mask, **given)
        share = micro_batch_share(mask, totals, self.reduction)
        weights = row_weights(
            mask, totals, self.reduction, max_seq_len=getattr(config, "max_seq_len", None), uids=uids
        )
        values, loss_metrics = call_policy_loss(
            self.name, self.function, log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs
        )
        policy = weighted_sum(values, mask, weights) if values.ndim else values * share.to(values.dtype)
        terms: dict[str, Tensor] = {"policy_loss": policy}
        loss = 0.0 * policy if self.compares_top and config.distillation.divergence_alone else policy
        if ref_log_probs is not None:
            kl = compute_approx_kl(log_probs, ref_log_probs, mask, config.kl_estimator_type)
            terms["policy_kl"] = weighted_sum(kl, mask, weights)
        if entropy is not None:
            terms["policy_entropy"] = weighted_sum(entropy, mask, weights)
        if config.use_kl_loss and config.kl_loss_coef:
            loss = loss + config.kl_loss_coef * _required(terms, "policy_kl", "use_kl_loss", "ref_log_probs")
        measured: ReducibleMetrics = {}
        if self.compares_top:
            if top_log_probs is None:
                raise AlgorithmError(
                    "trainer.algorithm.distillation.loss_coef needs top_log_probs, which were not given"
                )
            wanted = config.distillation
            distance, measured = divergence(*top_log_probs, mask, beta=wanted.beta, renormalize=wanted.renormalize)
            terms["distillation_loss"] = weighted_sum(distance, mask, weights)
            loss = loss + wanted.loss_coef * terms["distillation_loss"]
        if config.use_entropy_loss:
            loss = loss - config.entropy_loss_coef * _required(terms, "policy_entropy", "use_entropy_loss", "entropy")
        metrics = _totals_as_metrics({"final_loss": loss, **terms}, share) | measured
        return loss, metrics | {f"loss_metrics/{name}": metric for name, metric in loss_metrics.items()}


def _required(terms: dict[str, Tensor], term: str, option: str, argument: str) -> Tensor:
    if term not in terms:
        raise AlgorithmError(f"trainer.algorithm.{option}=true needs {argument}, which were not given")
    return terms[term]


def _totals_as_metrics(terms: dict[str, Tensor], share: Tensor) -> ReducibleMetrics:
    """Return parts of the step's totals as pairs: values add up to the total, shares to 1."""
    return {name: Mean(value.detach().double(), share) for name, value in terms.items()}
