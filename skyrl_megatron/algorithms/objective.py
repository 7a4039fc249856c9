"""The objective of an optimizer step.

The policy minimises policy loss + KL to the reference - entropy, each averaged over the whole step. The critic
minimises the value loss. This module calls the registered losses, built-in or custom.

A custom loss takes ``(log_probs, old_log_probs, advantages, config)`` and optionally ``loss_mask`` and the engine's
log-probs, as ``rollout_log_probs`` or ``rollout_logprobs``. It returns one of two pairs:

* ``(loss of each token [B, T], metrics)``. It is masked and averaged like a built-in loss.
* ``(scalar, metrics)``, where the scalar is the mean over its micro-batch. It is weighted by the valid tokens of the
  micro-batch, or by its sequences for ``loss_reduction`` ``sequence_mean`` and ``prompt_mean``. Such a loss depends on
  how a batch is split into micro-batches, which causes one warning.

Metrics are a number (the clip ratio) or a dict of numbers. A number is the mean over the tokens of the micro-batch,
unless its name ends in ``_min`` or ``_max``. Scalar tensors and (sum, count) pairs are accepted as well.

The training engine does this in each optimizer step::

    objective = PolicyObjective(config)                       # at each step, as the registry may have changed
    shard = objective.totals(loss_mask, old_log_probs=…, rollout_log_probs=…, uids=…)   # of this rank
    totals = <sum of `shard` over the dp ranks>
    for each micro-batch:
        loss, metrics = objective(totals, log_probs, advantages, loss_mask, …)
        loss.backward()                                       # gradients are summed over micro-batches and dp ranks
    metrics: merge_metrics over micro-batches, pack_metrics + two all-reduces over dp, metric_values

The loss of a micro-batch is its share of the step's loss; the shares of all micro-batches and ranks add up to it.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from skyrl_megatron.algorithms.distillation import divergence
from skyrl_megatron.algorithms.kl import compute_approx_kl
from skyrl_megatron.algorithms.losses import BUILT_IN, BuiltinLoss, PolicyLossRegistry, ppo_critic_loss
from skyrl_megatron.algorithms.masked import check_token_tensors, keep_masked
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.off_policy import effective_mask
from skyrl_megatron.algorithms.reduction import StepTotals, micro_batch_share, row_weights, step_totals, weighted_sum
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.errors import AlgorithmError, SkyRLMegatronWarning

OPTIONAL = {"loss_mask": "loss_mask", "rollout_log_probs": "rollout", "rollout_logprobs": "rollout"}

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Issue a SkyRLMegatronWarning, once per process and message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, SkyRLMegatronWarning, stacklevel=3)


def call_policy_loss(
    name: str,
    function: Callable[..., Any],
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None = None,
) -> tuple[Tensor, ReducibleMetrics]:
    """Call a policy loss: return the loss of each token [B, T] or a scalar, and its reducible metrics.

    Raises AlgorithmError (a ValueError) if the function has other parameters or returns something else.
    """
    optional = {"loss_mask": loss_mask, "rollout": rollout_log_probs}
    keywords = {spelling: optional[kind] for spelling, kind in accepted_keywords(name, function).items()}
    result = function(log_probs, old_log_probs, advantages, config, **keywords)
    loss, metrics = _checked_pair(name, result, log_probs)
    if loss.ndim == 2:
        # a custom loss may divide by a masked value: NaN must not reach the sum
        loss = keep_masked(loss, loss_mask)
    else:
        warn_once(
            f"the policy loss {name!r} returns a scalar, which is used as the mean over its micro-batch: loss and"
            " gradient depend on how the batch is split. Return the loss of each token to avoid that"
        )
    return loss, reducible(name, metrics, loss_mask)


def accepted_keywords(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the optional arguments that ``function`` takes: parameter name → ``loss_mask`` or ``rollout``.

    Raises AlgorithmError if it has fewer than four parameters or requires another argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature: pass all optional arguments
        return {"loss_mask": "loss_mask", "rollout_log_probs": "rollout"}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    rest = [*positional[4:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
    unknown = [p.name for p in rest if p.default is p.empty and p.name not in OPTIONAL]
    if unknown or (len(positional) < 4 and not starred):
        raise AlgorithmError(
            f"the policy loss {name!r} has parameters ({', '.join(p.name for p in parameters)}); it must take"
            " (log_probs, old_log_probs, advantages, config) and may take loss_mask and rollout_log_probs, or"
            " rollout_logprobs"
        )
    accepted = {p.name: OPTIONAL[p.name] for p in rest if p.name in OPTIONAL}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted.setdefault("loss_mask", "loss_mask")
        if "rollout" not in accepted.values():
            accepted["rollout_log_probs"] = "rollout"
    return accepted


def _checked_pair(name: str, result: object, log_probs: Tensor) -> tuple[Tensor, object]:
    """Return (loss, metrics) of a policy loss. Raises AlgorithmError if ``result`` is not such a pair."""
    shape = list(log_probs.shape)
    wanted = f"the policy loss {name!r} must return (loss, metrics), the loss a scalar tensor or one of shape {shape}"
    if not isinstance(result, tuple | list) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise AlgorithmError(f"{wanted}; got {got}")
    loss, metrics = result
    if not isinstance(loss, Tensor):
        raise AlgorithmError(f"{wanted}; the loss is {type(loss).__name__} {loss!r}")
    if not loss.is_floating_point() or (loss.ndim != 0 and list(loss.shape) != shape):
        raise AlgorithmError(f"{wanted}; the loss is {loss.dtype} {list(loss.shape)}")
    # checked here, because a loss that was computed from detached values trains nothing, without an error
    if torch.is_grad_enabled() and log_probs.requires_grad and not loss.requires_grad:
        raise AlgorithmError(f"{wanted}; the loss has no gradient: it must be computed from log_probs")
    return loss, metrics


def reducible(name: str, metrics: object, loss_mask: Tensor) -> ReducibleMetrics:
    """Return the metrics of a custom loss as reducible metrics, scalar tensors. A number is weighted by the valid
    tokens in ``loss_mask`` [B, T]."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        metrics = {"clip_ratio": metrics}
    tokens = (loss_mask > 0).sum().double()
    reduced: ReducibleMetrics = {}
    for key, value in metrics.items():
        if isinstance(value, tuple) and len(value) == 2:
            sum_, count = (torch.as_tensor(part, device=tokens.device).detach().double() for part in value)
            reduced[str(key)] = Mean(sum_, count)
        elif isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            number = torch.as_tensor(value, device=tokens.device).detach().double().reshape(())
            extreme = str(key).endswith(("_min", "_max"))
            reduced[str(key)] = number if extreme else Mean(number * tokens, tokens)
        else:
            raise AlgorithmError(
                f"the policy loss {name!r} returned the metric {key!r} = {type(value).__name__}: return a number, a "
                "scalar tensor or a pair (sum, count)"
            )
    return reduced


class Objective(Protocol):
    """Interface of policy and critic objectives, without the loss of a micro-batch."""

    def totals(
        self,
        loss_mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        observation_mask: Tensor | None = None,
        uids: Sequence[str] | None = None,
    ) -> StepTotals:
        """Count a shard of the mini-batch, [B, T] each; ``uids`` [B]."""
        ...

    def weight(self, totals: StepTotals) -> float:
        """Return the denominator of the mean over what ``totals`` counted."""
        ...


class PolicyObjective:
    """The policy objective of ``config`` (an AlgorithmConfig), with the loss that is registered now.

    Raises AlgorithmError if the loss is not registered. Warns once if loss and gradient depend on how a batch is split
    into micro-batches.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.name = str(config.policy_loss_type)
        self.function = PolicyLossRegistry.get(self.name)
        self.builtin = cast(BuiltinLoss, self.function) if self.function in BUILT_IN.values() else None
        self.reduction = str(config.loss_reduction)
        # a custom loss gets the engine's log-probs and corrects by itself
        corrected = self.builtin is not None and self.builtin.row.corrected
        self.correction = getattr(config, "off_policy_correction", None) if corrected else None
        if self.builtin is not None and self.builtin.row.depends_on_cut:
            warn_once(
                f"the policy loss {self.name!r} uses statistics of its micro-batch: loss and gradient depend on how a"
                " batch is split into micro-batches and data-parallel ranks"
            )

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the loss reads the trainer's log-probs before the update. If not, their forward pass is skipped."""
        return correction_enabled(self.correction) or self.builtin is None or self.builtin.row.uses_old(self.config)

    @property
    def compares_top(self) -> bool:
        """Whether the loss includes the divergence from a teacher's top-K distributions."""
        wanted = getattr(self.config, "distillation", None)
        return wanted is not None and wanted.loss_coef > 0

    @property
    def observes(self) -> bool:
        """Whether the loss includes the cross-entropy of observations."""
        return bool(getattr(self.config, "observation_loss_coef", 0.0))

    def effective_mask(
        self, loss_mask: Tensor, old_log_probs: Tensor | None = None, rollout_log_probs: Tensor | None = None
    ) -> Tensor:
        """Return the loss mask [B, T] without the tokens that the off-policy correction drops."""
        return effective_mask(old_log_probs, rollout_log_probs, loss_mask, self.correction)

    def totals(
        self,
        loss_mask: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        observation_mask: Tensor | None = None,
        uids: Sequence[str] | None = None,
    ) -> StepTotals:
        """Count a shard of the mini-batch, [B, T] each; add the counts up over shards before the step."""
        # the tokens that the correction will drop must not be in the denominator: they are known before the
        # step
        mask = self.effective_mask(loss_mask, old_log_probs, rollout_log_probs)
        totals = step_totals(mask, self.reduction, uids)
        if observation_mask is None or not self.observes:
            return totals
        return dataclasses.replace(totals, observed=int((observation_mask > 0).sum()))

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
        observation_mask: Tensor | None = None,
        uids: Sequence[str] | None = None,
    ) -> tuple[Tensor, ReducibleMetrics]:
        """Return the loss of a micro-batch, a scalar to call ``backward`` on, and its metrics; all tensors [B, T].

        ``use_kl_loss`` requires ``ref_log_probs``, ``use_entropy_loss`` requires ``entropy`` (nats, differentiable).
        Without these options they only add metrics. ``distillation.loss_coef`` requires ``top_log_probs``: log-probs
        of the policy (differentiable) and of the teacher for the teacher's likeliest tokens, [B, T, K] each.
        ``observation_loss_coef`` reads ``observation_mask``: tokens of the environment, which are outside the loss
        mask and have a denominator of their own, ``totals.observed``. Metrics: ``final_loss``, ``policy_loss``,
        ``policy_kl``, ``policy_entropy`` as shares of the step's values, and
        ``loss_metrics/…`` of the policy loss. Raises AlgorithmError if a required tensor is missing.
        """
        config = self.config
        recorded = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
        others = {"ref_log_probs": ref_log_probs, "entropy": entropy, "loss_mask": loss_mask, "advantages": advantages}
        # broadcasting would accept [B, 1] and [1, T], and give wrong sums
        check_token_tensors("log_probs", log_probs=log_probs, **recorded, **others)
        mask = self.effective_mask(loss_mask, **recorded)
        share = micro_batch_share(mask, totals, self.reduction)
        weights = row_weights(
            mask, totals, self.reduction, max_seq_len=getattr(config, "max_seq_len", None), uids=uids
        )
        values, loss_metrics = call_policy_loss(
            self.name, self.function, log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs
        )
        policy = weighted_sum(values, mask, weights) if values.ndim else values * share.to(values.dtype)
        terms: dict[str, Tensor] = {"policy_loss": policy}
        # the policy loss is still computed, for its metrics
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
                    "trainer.algorithm.distillation.loss_coef needs top_log_probs, but they are missing: configure "
                    "trainer.teacher, or set it to 0"
                )
            wanted = config.distillation
            distance, measured = divergence(*top_log_probs, mask, beta=wanted.beta, renormalize=wanted.renormalize)
            terms["distillation_loss"] = weighted_sum(distance, mask, weights)
            loss = loss + wanted.loss_coef * terms["distillation_loss"]
        if config.use_entropy_loss:
            loss = loss - config.entropy_loss_coef * _required(terms, "policy_entropy", "use_entropy_loss", "entropy")
        if self.observes and observation_mask is not None:
            observed = keep_masked(log_probs, observation_mask).sum(dtype=torch.float64)
            # a denominator of its own: observations are not in the loss mask, and would dilute the policy's
            # mean
            terms["observation_loss"] = (-observed / max(totals.observed, 1)).to(policy.dtype)
            loss = loss + config.observation_loss_coef * terms["observation_loss"]
        metrics = _totals_as_metrics({"final_loss": loss, **terms}, share) | measured
        return loss, metrics | {f"loss_metrics/{name}": metric for name, metric in loss_metrics.items()}


def _required(terms: dict[str, Tensor], term: str, option: str, argument: str) -> Tensor:
    if term not in terms:
        raise AlgorithmError(
            f"trainer.algorithm.{option}=true needs {argument}, which is missing: pass it, or set the option to false"
        )
    return terms[term]


def _totals_as_metrics(terms: dict[str, Tensor], share: Tensor) -> ReducibleMetrics:
    """Return a micro-batch's part of the step's totals as pairs. Values add up to the total, shares to 1."""
    return {name: Mean(value.detach().double(), share) for name, value in terms.items()}


class CriticObjective:
    """The value loss of ``config`` (an AlgorithmConfig): :func:`ppo_critic_loss`, a mean over tokens.

    It has the interface of :class:`PolicyObjective`. ``loss_reduction`` applies to the policy only: the critic
    regresses a value at each token, independently of its sequence.
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
