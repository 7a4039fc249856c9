"""Policy losses and the critic's loss.

A policy loss is ``fn(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None)``. All
tensors are [B, T], log-probs in nats. Advantages are those of the estimator, without further scaling. A built-in loss
returns the loss of each token [B, T], 0 where masked, and a dict of metrics; ``reduction.py`` averages it. A custom
loss may return a scalar instead (``objective.py``).

A built-in loss is written as a formula of (log_probs, old_log_probs, advantages, config, mask, rollout). ``mask`` is
the loss mask, ``rollout`` the engine's log-probs or None, and every tensor is 0 where the mask is 0.
:func:`builtin_loss` turns the formula into a registered function, which

* accepts any value in padding, also NaN: loss and gradient are exactly 0 there,
* if its row says ``corrected``, applies the off-policy correction: dropped tokens get loss 0, the others are weighted,
* if its row has an ``anchor`` that is set to ``rollout``, gets the engine's log-probs as ``old_log_probs``.

The rows of these losses are in :mod:`skyrl_megatron.config.table`, as a configuration is checked without torch. A new
loss gives its row to the decorator, and the class of its settings stands in this file too: no other has to be changed.

In all formulas r = exp(log_probs - old_log_probs), A is the advantage, and clip(r) is r limited to [1 - eps_clip_low,
1 + eps_clip_high]. The metric ``clip_ratio`` is the share of tokens whose loss the limit changed.

With ``ratio_anchor=rollout``, ``regular``, ``dual_clip``, ``gspo`` and ``sapo`` take r = exp(log_probs -
rollout_log_probs). The clip then limits how far a token moves from the policy that sampled it, in all updates since.
The masks of the off-policy correction stay; its weights would correct twice.

``clip_cov`` and ``kl_cov`` use the covariance of a token: (advantage - mean advantage) · (log-prob - mean log-prob),
with means over the micro-batch. They therefore depend on how a batch is split into micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import check_token_tensors, keep_masked, masked_mean
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, moments, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio, correct
from skyrl_megatron.algorithms.registry import BaseFunctionRegistry
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.schema.algorithm import PolicyLossType, correction_enabled
from skyrl_megatron.config.table import LOSSES, LossRow
from skyrl_megatron.errors import AlgorithmError

type Formula = Callable[[Tensor, Tensor, Tensor, Any, Tensor, Tensor | None], tuple[Tensor, ReducibleMetrics]]


class BuiltinLoss(Protocol):
    """A registered built-in loss with its properties."""

    row: LossRow
    """What it reads, and whether the off-policy correction is applied to it."""
    __name__: str

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, ReducibleMetrics]:
        """Return the loss of each token [B, T], unscaled and 0 where masked, and metrics."""
        ...


def nothing_clipped(mask: Tensor) -> ReducibleMetrics:
    """Return the metric ``clip_ratio`` with value 0, for losses without clipping."""
    return {"clip_ratio": token_mean(torch.zeros_like(mask, dtype=torch.bool), mask)}


def require_rollout(name: str, rollout: Tensor | None) -> Tensor:
    """Return the engine's log-probs. Raises AlgorithmError if they are missing."""
    if rollout is None:
        raise AlgorithmError(f"{name} needs the engine's log-probs: set generator.sampling_params.logprobs=1")
    return rollout


def require_one_weight(setting: str, correction: Any) -> None:
    """Raise AlgorithmError if ``correction`` weights by the ratio to the engine, which ``setting`` already does."""
    if correction is not None and correction.tis_ratio_type is not None:
        raise AlgorithmError(
            f"off_policy_correction.tis_ratio_type={correction.tis_ratio_type!r} with {setting} corrects twice: set "
            f"tis_ratio_type=null or {setting.partition('=')[0]}=old"
        )


BUILT_IN: dict[str, BuiltinLoss] = {}
"""Every loss of this file by its name."""


def builtin_loss(row: LossRow | None = None) -> Callable[[Formula], BuiltinLoss]:
    """Return a decorator that turns a formula into the built-in loss of its name, with the registry's signature.

    ``row``: that of a loss without one in :mod:`skyrl_megatron.config.table`.
    """

    def decorate(formula: Formula) -> BuiltinLoss:
        name = formula.__name__
        if row is not None:
            LOSSES.add(name, row)
        facts = LOSSES[name]

        def loss(
            log_probs: Tensor,
            old_log_probs: Tensor | None,
            advantages: Tensor,
            config: Any,
            loss_mask: Tensor | None = None,
            rollout_log_probs: Tensor | None = None,
        ) -> tuple[Tensor, ReducibleMetrics]:
            mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
            check_token_tensors(
                "log_probs",
                log_probs=log_probs,
                old_log_probs=old_log_probs,
                advantages=advantages,
                loss_mask=mask,
                rollout_log_probs=rollout_log_probs,
            )
            cfg = getattr(config, "off_policy_correction", None) if facts.corrected else None
            if old_log_probs is None:
                if facts.uses_old(config) or correction_enabled(cfg):
                    raise AlgorithmError(f"the policy loss {name} needs old_log_probs with this config")
                old_log_probs = torch.zeros_like(log_probs)  # not read
            # Masked before the formula: `where` after it hides NaN of padding in the loss, but not in the gradient.
            old = keep_masked(old_log_probs, mask)
            base = old
            rollout = None if rollout_log_probs is None else keep_masked(rollout_log_probs, mask)
            if facts.is_anchored(config):
                base = require_rollout(f"{name} with {facts.anchor}=rollout", rollout)
                require_one_weight(f"{facts.anchor}=rollout", cfg)
            values, metrics = formula(
                keep_masked(log_probs, mask), base, keep_masked(advantages, mask), config, mask, rollout
            )
            # With `old` also for an anchored ratio: the masks compare the trainer before the update with the engine.
            correction = correct(old, rollout, mask, cfg)
            if correction.weight is not None:
                values = values * correction.weight
            return keep_masked(values, correction.mask), metrics | correction.metrics

        # Pickle and the registries then find the loss by its import path. Not functools.wraps: inspect.signature would
        # follow `__wrapped__` to the formula's parameters.
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(loss, attribute, getattr(formula, attribute))
        registered = cast(BuiltinLoss, loss)
        registered.row = facts
        BUILT_IN[name] = registered
        return registered

    return decorate


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: Any, mask: Tensor) -> tuple[Tensor, ReducibleMetrics]:
    """Return -min(r·A, clip(r)·A) of each token [B, T], and the metric ``clip_ratio``."""
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    # `clipped > free` leaves out ratios beyond a limit on the side where the minimum takes r·A: the limit changes
    # nothing there.
    return torch.maximum(free, clipped), {"clip_ratio": token_mean(clipped > free, mask)}


@builtin_loss()
def regular(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -min(r·A, clip(r)·A) of each token. arXiv:1707.06347, equation 7."""
    return clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, mask)


@builtin_loss()
def dual_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss, limited to -c·A where A < 0, with c = ``clip_ratio_c``. arXiv:1912.09729."""
    loss, metrics = clipped_surrogate(clamped_ratio(log_probs - old_log_probs), advantages, config, mask)
    # Where A < 0 the minimum in PPO's objective is r·A for large r: one token's loss would have no upper bound.
    limited = torch.minimum(loss, -config.clip_ratio_c * advantages)
    return torch.where(advantages < 0, limited, loss), metrics


@builtin_loss()
def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss with one ratio per sequence, the geometric mean of r (equations 14 and 15).

    All tokens of a sequence share the value of the ratio; its gradient is per token. Meant for
    ``loss_reduction=sequence_mean``.
    """
    sequence = masked_mean(log_probs - old_log_probs, mask, dim=1)[:, None]
    # The difference is 0 and has the token's gradient, so that no token gets the gradient of others. At most e¹⁰: exp
    # must not overflow.
    ratio = (log_probs - log_probs.detach() + sequence.detach()).clamp(max=10.0).exp()
    return clipped_surrogate(ratio, advantages, config, mask)


@builtin_loss()
def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -g·A with the soft gate g = σ(τ(r - 1))·4/τ in place of the ratio r.

    τ is ``tau_pos`` where A > 0, else ``tau_neg``. Meant for ``loss_reduction=sequence_mean``.
    """
    ratio = clamped_ratio(log_probs - old_log_probs)
    temperature = torch.full_like(ratio, config.sapo.tau_neg).masked_fill(advantages > 0, config.sapo.tau_pos)
    # By 4/τ the slope at r = 1 is 1 for every τ, that of PPO, as the slope of σ(τ·x) at 0 is τ/4.
    gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
    return -gate * advantages, nothing_clipped(mask)


@builtin_loss()
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return REINFORCE's loss weighted by r, limited to 1 - cispo_eps_clip_low … 1 + cispo_eps_clip_high.

    With ``cispo.anchor=rollout`` r is relative to the engine's log-probs, which already is an off-policy correction.
    Truncated importance sampling in addition would correct twice and raises AlgorithmError.
    """
    ratio = clamped_ratio(log_probs - old_log_probs)
    # A constant factor: tokens at the limit keep the gradient of their log-prob, which PPO's clip sets to 0.
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high).detach()
    metrics: ReducibleMetrics = {
        "clip_ratio": token_mean(ratio != weight, mask),
        **moments("cispo/ratio", ratio, mask),
        "cispo/ratio_clamped_mean": token_mean(weight, mask),
    }
    return -weight * advantages * log_probs, metrics


@builtin_loss()
def dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A, and 0 for tokens that are too far from the engine's policy and would move further away.

    r is relative to the engine's log-probs. The distance is that of the two outcomes {token, not token}: total
    variation |p - q| (``dppo_type=binary_tv``, equation 13) or KL(q ‖ p) (``binary_kl``, equation 14). The loss of a
    token is 0 if its probability rose, its advantage is positive and the distance exceeds ``delta_high``, or if its
    probability fell, its advantage is negative and the distance exceeds ``delta_low``.
    """
    rollout = require_rollout("dppo", rollout)
    with torch.no_grad():
        here, there = log_probs.exp(), rollout.exp()
        rise = here - there
        match config.dppo.dppo_type:
            case "binary_tv":
                distance = rise.abs()
            case "binary_kl":
                # 1e-8: in fp32 the probability of a sure token is 1, and log(0/0) is NaN.
                rest = torch.log((1 - there + 1e-8) / (1 - here + 1e-8))
                distance = there * (rollout - log_probs) + (1 - there) * rest
            case other:
                raise AlgorithmError(f"dppo.dppo_type={other!r}: choose binary_tv or binary_kl")
        too_high = (advantages > 0) & (rise > 0) & (distance > config.dppo.delta_high)
        too_low = (advantages < 0) & (rise < 0) & (distance > config.dppo.delta_low)
        dropped = too_high | too_low
    ratio = clamped_ratio(log_probs - rollout)
    return torch.where(dropped, 0.0, -ratio * advantages), {"clip_ratio": token_mean(dropped, mask)}


@builtin_loss()
def m2po(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A with r relative to the engine's log-probs, and 0 for the tokens that exceed a second-moment budget.

    The tokens of A > 0, r > 1 and of A < 0, r < 1 are the trust region. Its largest (log r)² are left out until the
    mean of the others is at most ``m2po_threshold``. Tokens outside the region stay, and the tokens left out count in
    the denominator. This is algorithm 1 of the paper, arXiv:2510.01161, with a micro-batch of one rank as its batch.

    The authors' code (Infini-AI-Lab/M2PO, commit 4514ce2, also by micro-batch) clips the region instead, at the
    |log r| to which all larger ones must be cut for a mean of the budget. Of Gaussian log r with σ = 0.3 the algorithm
    leaves out 19.6 % of the region, and the code clips 37.3 %; 20.5 % with its functions' floor, which clips ratios
    below 0.7 or above 1.5 only and which its training scripts unset. Metrics: ``clip_ratio``, the share of tokens left
    out, and ``m2po/second_moment``, the mean (log r)² of the region before.
    """
    log_ratio = log_probs - require_rollout("m2po", rollout)
    with torch.no_grad():
        region = (mask > 0) & (advantages * log_ratio > 0)
        # ∞ outside the region: no mean that contains one is within the budget. In float64, as all tokens are summed.
        second = torch.where(region, log_ratio.double().square(), torch.inf).flatten()
        ordered, order = second.sort()  # those outside the region come last
        count = torch.arange(1, len(ordered) + 1, device=ordered.device, dtype=torch.float64)
        kept = ordered.cumsum(0) / count <= config.m2po_threshold  # means of ascending numbers ascend
        dropped = region & ~torch.zeros_like(kept).scatter(0, order, kept).view_as(region)
    metrics: ReducibleMetrics = {
        "clip_ratio": token_mean(dropped, mask),
        "m2po/second_moment": token_mean(log_ratio.square(), region),
    }
    return torch.where(dropped, 0.0, -clamped_ratio(log_ratio) * advantages), metrics


# A separate generator: draws from torch's would change the dropout of everything that follows. On CPU, so that the
# picks do not depend on the device.
_picks = torch.Generator().manual_seed(0)


def seed_random_picks(*parts: int | str) -> None:
    """Seed the random choice of tokens that ``clip_cov`` makes.

    All ranks that hold the same tokens (tp, cp, pp) must choose the same tokens. Call this before each micro-batch
    with values that these ranks share, such as (seed, step, dp rank, index of the micro-batch).
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    _picks.manual_seed(int.from_bytes(digest))


@torch.no_grad()
def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the contribution of each token to the covariance of advantage and log-probability, [B, T]."""
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


@builtin_loss()
def clip_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return PPO's loss, set to 0 for a few tokens of high covariance.

    These are max(⌊clip_ratio · tokens⌋, 1) tokens, chosen at random among those that PPO does not clip and whose
    covariance is between ``clip_cov_lb`` and ``clip_cov_ub``. The metric ``clip_ratio`` is the share of chosen tokens.
    """
    ratio = (log_probs - old_log_probs).exp()
    loss, _ = clipped_surrogate(ratio, advantages, config, mask)
    with torch.no_grad():
        cov, unclipped = covariance(log_probs, advantages, mask), loss <= -ratio * advantages
        inside = (cov > config.clip_cov.clip_cov_lb) & (cov < config.clip_cov.clip_cov_ub)
        # Padding is 0, so its covariance is the product of both means: the mask must leave it out.
        candidates = (inside & unclipped & (mask > 0)).flatten().nonzero().squeeze(1)
        count = max(int(config.clip_cov.clip_ratio * int((mask > 0).sum())), 1)
        order = torch.randperm(len(candidates), generator=_picks)[:count].to(candidates.device)
        chosen = torch.zeros_like(mask, dtype=torch.bool).flatten().index_fill(0, candidates[order], True)
        chosen = chosen.view_as(mask)
    return torch.where(chosen, 0.0, loss), {"clip_ratio": token_mean(chosen, mask)}


@builtin_loss()
def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A, plus ``ppo_kl_coef``·|log r| for the tokens of largest covariance.

    Their number is max(⌊kl_cov_frac · tokens⌋, 1).
    """
    difference = log_probs - old_log_probs
    loss = -difference.exp() * advantages
    valid = (mask > 0).flatten()
    tokens = int(valid.sum())
    # Padding is 0, so its covariance is the product of both means, which may be among the largest.
    cov = covariance(log_probs, advantages, mask).flatten().masked_fill(~valid, -torch.inf)
    # At most the valid tokens: topk would take padding next.
    count = min(max(int(config.kl_cov.kl_cov_frac * tokens), 1), tokens)
    chosen = torch.zeros_like(valid).index_fill(0, cov.topk(count).indices, True).view_as(mask)
    penalty = config.kl_cov.ppo_kl_coef * difference.abs()
    return torch.where(chosen, loss + penalty, loss), nothing_clipped(mask)


@builtin_loss()
def importance_sampling(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -r·A with r = exp(log_probs - old_log_probs), neither clamped nor corrected.

    Metric ``importance_ratio``: mean r.
    """
    ratio = (log_probs - old_log_probs).exp()
    return -ratio * advantages, {"importance_ratio": token_mean(ratio, mask)}


@builtin_loss()
def rollout_is(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return REINFORCE's loss weighted by r relative to the engine's log-probs; 0 outside the PPO clip range."""
    ratio = clamped_ratio(log_probs - require_rollout("rollout_is", rollout))
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    # A constant factor of ∇log p: the gradient of r·log p would have a second term, log p·∇r.
    weight = torch.where(inside, ratio, 0.0).detach()
    return -weight * advantages * log_probs, {"clip_ratio": token_mean(~inside, mask)}


@builtin_loss()
def cross_entropy(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -log p of each token."""
    return -log_probs, nothing_clipped(mask)


def ppo_critic_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, config: Any, loss_mask: Tensor | None = None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return ½·max((V - R)², (clip(V) - R)²) of each token [B, T], 0 where masked, and the metric ``clip_ratio``.

    clip(V) keeps V within ``config.value_clip`` of ``old_values``; None disables clipping. ``reduction.py`` averages
    the result. Raises AlgorithmError for shapes that differ.
    """
    check_token_tensors("values", values=values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    mask = torch.ones_like(values) if loss_mask is None else loss_mask
    values, old_values, returns = (keep_masked(tensor, mask) for tensor in (values, old_values, returns))
    free = (values - returns).square()
    limit = config.value_clip
    near = values if limit is None else old_values + (values - old_values).clamp(-limit, limit)
    clipped = (near - returns).square()
    # The larger one, so that a value that has moved beyond the limit away from its return still has its full loss.
    return 0.5 * torch.maximum(free, clipped), {"clip_ratio": token_mean(clipped > free, mask)}


__all__ = ["PolicyLossRegistry", "PolicyLossType", "ppo_critic_loss", "register_policy_loss", "seed_random_picks"]


class PolicyLossRegistry(BaseFunctionRegistry):
    """Policy losses by name (``algorithm.policy_loss_type``)."""

    _function_type = "policy loss"
    _rows = LOSSES


PolicyLossRegistry.add_builtins(LOSSES.rows, BUILT_IN)


def register_policy_loss(
    name: str,
    *,
    settings: type[BaseConfig] | None = None,
    reads: Iterable[str] | None = None,
    reads_rollout: bool = False,
    corrected: bool | None = None,
    refuses: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the policy loss ``name``.

    The rest is for the checks of a configuration, and may be left out (:class:`skyrl_megatron.config.table.LossRow`).
    ``settings``: dataclass of its section ``trainer.algorithm.<name>``. ``reads``: those of the settings that not
    every loss reads, such as ``eps_clip_low``; the others are then reported as without effect. ``reads_rollout``: it
    needs the engine's log-probs. ``corrected``: False if it is only right for samples of the current policy; stale
    samples are then an error, and ``off_policy_correction`` is reported as without effect. ``refuses``: other keys
    that must not be set → what to do.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # First: it raises for a name that is taken, whose row must then stay.
        PolicyLossRegistry.register(name, function)
        LOSSES.add(
            name,
            LossRow(
                settings=settings,
                reads=None if reads is None else frozenset(reads),
                reads_rollout=reads_rollout,
                corrected=corrected,
                refuses=refuses or {},
            ),
        )
        return function

    return decorate
