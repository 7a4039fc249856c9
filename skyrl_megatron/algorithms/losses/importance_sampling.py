"""Losses without the PPO clip: likelihood, importance weights, and gates or masks upon them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss
from skyrl_megatron.algorithms.metrics import Metrics, moments, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio
from skyrl_megatron.errors import AlgorithmError


def never(config: Any) -> bool:
    """For losses that do not read the old log-probs."""
    return False


def anchored_to_rollout(config: Any) -> bool:
    """True when ``cispo`` measures its ratio against the engine's log-probs."""
    return bool(getattr(config.cispo, "anchor", "old") == "rollout")


def nothing_clipped(mask: Tensor) -> Metrics:
    """``clip_ratio`` 0, for losses that clip nothing."""
    return {"clip_ratio": token_mean(torch.zeros_like(mask, dtype=torch.bool), mask)}


def required_rollout(name: str, rollout_log_probs: Tensor | None) -> Tensor:
    """The engine's log-probs. Raises AlgorithmError where they are missing."""
    if rollout_log_probs is None:
        raise AlgorithmError(f"{name} needs the engine's log-probs: set generator.sampling_params.logprobs=1")
    return rollout_log_probs


@builtin_loss(corrected=False, uses_old=never)
def cross_entropy(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """Supervised fine-tuning: -log p, whatever the advantage."""
    return -log_probs, nothing_clipped(loss_mask)


@builtin_loss(corrected=False)
def importance_sampling(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """-r·A with r = exp(log_probs - old_log_probs), neither clamped nor corrected.

    Metric ``importance_ratio``: mean r.
    """
    ratio = (log_probs - old_log_probs).exp()
    return -ratio * advantages, {"importance_ratio": token_mean(ratio, loss_mask)}


@builtin_loss()
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """SAPO (arXiv:2511.20347): a soft gate σ(τ(r - 1))·4/τ in place of the ratio.

    τ is ``tau_pos`` where A > 0, else ``tau_neg``. Meant for ``loss_reduction=sequence_mean``.
    """
    ratio = clamped_ratio(log_probs - old_log_probs)
    temperature = torch.full_like(ratio, config.sapo.tau_neg).masked_fill(advantages > 0, config.sapo.tau_pos)
    gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
    return -gate * advantages, nothing_clipped(loss_mask)


@builtin_loss(uses_old=lambda config: not anchored_to_rollout(config))
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """CISPO (arXiv:2506.13585): REINFORCE weighted by r, limited to 1 - cispo_eps_clip_low … 1 + cispo_eps_clip_high.

    With ``cispo.anchor=rollout`` r is against the engine's log-probs, which is an off-policy correction by itself:
    truncated importance sampling on top would count it twice and raises AlgorithmError.
    """
    anchor, correction = old_log_probs, getattr(config, "off_policy_correction", None)
    if anchored_to_rollout(config):
        anchor = required_rollout("cispo with cispo.anchor=rollout", rollout_log_probs)
        if correction is not None and correction.tis_ratio_type is not None:
            raise AlgorithmError(
                f"off_policy_correction.tis_ratio_type={correction.tis_ratio_type!r} with cispo.anchor=rollout"
                " corrects twice: set one of them back"
            )
    ratio = clamped_ratio(log_probs - anchor)
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high).detach()
    metrics: Metrics = {
        "clip_ratio": token_mean(ratio != weight, loss_mask),
        **moments("cispo/ratio", ratio, loss_mask),
        "cispo/ratio_clamped_mean": token_mean(weight, loss_mask),
    }
    return -weight * advantages * log_probs, metrics


@builtin_loss(uses_old=never)
def rollout_is(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """REINFORCE weighted by r = exp(log_probs - rollout_log_probs); 0 for tokens with r outside the PPO clip range."""
    ratio = clamped_ratio(log_probs - required_rollout("rollout_is", rollout_log_probs))
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    weight = torch.where(inside, ratio, 0.0).detach()
    return -weight * advantages * log_probs, {"clip_ratio": token_mean(~inside, loss_mask)}


@builtin_loss(uses_old=never)
def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_log_probs: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """DPPO (arXiv:2602.04879): -r·A, except for tokens that moved too far from the engine's policy, further on.

    r is against the engine's log-probs. How far is measured on the two outcomes {token, not token}, by total variation
    |p - q| (``dppo_type=binary_tv``, equation 13) or KL(q ‖ p) (``binary_kl``, equation 14). A token is 0 when its
    probability rose, its advantage is positive, and the distance is above ``delta_high``; or all three mirrored, with
    ``delta_low``.
    """
    rollout = required_rollout("dppo", rollout_log_probs)
    with torch.no_grad():
        here, there = log_probs.exp(), rollout.exp()
        rise = here - there
        match config.dppo.dppo_type:
            case "binary_tv":
                distance = rise.abs()
            case "binary_kl":
                rest = torch.log((1 - there + 1e-8) / (1 - here + 1e-8))
                distance = there * (rollout - log_probs) + (1 - there) * rest
            case other:
                raise AlgorithmError(f"dppo.dppo_type={other!r}: choose binary_tv or binary_kl")
        too_high = (advantages > 0) & (rise > 0) & (distance > config.dppo.delta_high)
        too_low = (advantages < 0) & (rise < 0) & (distance > config.dppo.delta_low)
        dropped = too_high | too_low
    ratio = clamped_ratio(log_probs - rollout)
    return torch.where(dropped, 0.0, -ratio * advantages), {"clip_ratio": token_mean(dropped, loss_mask)}
