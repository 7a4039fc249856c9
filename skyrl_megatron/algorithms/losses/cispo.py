"""CISPO (arXiv:2506.13585): the ratio is clipped as a weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, require_rollout
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, moments, token_mean
from skyrl_megatron.algorithms.off_policy import clamped_ratio
from skyrl_megatron.errors import AlgorithmError


def anchored_to_rollout(config: Any) -> bool:
    """Return whether the ratio is measured against the engine's log-probs."""
    return bool(getattr(config.cispo, "anchor", "old") == "rollout")


@builtin_loss(uses_old=lambda config: not anchored_to_rollout(config))
def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return REINFORCE's loss weighted by r, limited to 1 - cispo_eps_clip_low … 1 + cispo_eps_clip_high.

    With ``cispo.anchor=rollout`` r is against the engine's log-probs, which is an off-policy correction by itself:
    truncated importance sampling on top would count it twice and raises AlgorithmError.
    """
    anchor, correction = old_log_probs, getattr(config, "off_policy_correction", None)
    if anchored_to_rollout(config):
        anchor = require_rollout("cispo with cispo.anchor=rollout", rollout)
        if correction is not None and correction.tis_ratio_type is not None:
            raise AlgorithmError(
                f"off_policy_correction.tis_ratio_type={correction.tis_ratio_type!r} with cispo.anchor=rollout"
                " corrects twice: set one of them back"
            )
    ratio = clamped_ratio(log_probs - anchor)
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high).detach()
    metrics: ReducibleMetrics = {
        "clip_ratio": token_mean(ratio != weight, mask),
        **moments("cispo/ratio", ratio, mask),
        "cispo/ratio_clamped_mean": token_mean(weight, mask),
    }
    return -weight * advantages * log_probs, metrics
