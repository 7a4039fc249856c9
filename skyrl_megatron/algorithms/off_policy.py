"""Off-policy correction for engines whose sampling probabilities differ slightly from those of the trainer.

Let r = exp(old_log_probs - rollout_log_probs) for each token. ``algorithm.off_policy_correction`` can, in this order,

1. drop sequences that have an outlier token (``outlier_token_is_threshold_*``), or whose mean of exp(|log r|) is
   large (``sequence_error_high``),
2. drop single tokens (``token_mask_is_threshold_*``),
3. weight the loss by the truncated ratio of the token or of the whole sequence (``tis_ratio_type``),
4. drop sequences whose product or geometric mean of r is out of bounds (``sequence_mask_metric``).

Each stage starts from the mask of the previous one. The masks depend only on old and rollout log-probs, so the
remaining tokens are known before the optimizer step: :func:`effective_mask`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked, masked_mean
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics, moments, token_mean
from skyrl_megatron.config.schema.algorithm import correction_enabled, masks_enabled
from skyrl_megatron.errors import AlgorithmError

LARGEST_LOG_RATIO = 20.0


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio […] (nats) clamped to ±20: at most 485 million, so it cannot overflow."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


class Correction(NamedTuple):
    """The effect of a correction on one batch of sequences."""

    mask: Tensor
    """[B, T]: the loss mask without the dropped tokens, in its dtype."""
    weight: Tensor | None
    """[B, T] or [B, 1], no gradient: factor of the loss. None means 1."""
    metrics: ReducibleMetrics


@torch.no_grad()
def correct(old_log_probs: Tensor, rollout_log_probs: Tensor | None, loss_mask: Tensor, cfg: Any) -> Correction:
    """Compute the correction from ``old_log_probs``, ``rollout_log_probs`` (nats) and ``loss_mask``, all [B, T].

    ``cfg`` is an OffPolicyCorrectionConfig. Statistics cover valid tokens, and sequences with valid tokens.
    Raises AlgorithmError without rollout log-probs, or for an unknown type.
    """
    if not correction_enabled(cfg):
        return Correction(loss_mask, None, {})
    if rollout_log_probs is None:
        raise AlgorithmError(
            "trainer.algorithm.off_policy_correction needs the engine's log-probs: set"
            " generator.sampling_params.logprobs=1, or switch the correction off"
        )
    # masked first: the two sides may have anything where nothing was sampled
    log_ratio = keep_masked(old_log_probs - rollout_log_probs, loss_mask)
    ratio, mask, weight = clamped_ratio(log_ratio), loss_mask, None
    metrics = moments("is_ratio", ratio, mask)
    low, high = cfg.outlier_token_is_threshold_low, cfg.outlier_token_is_threshold_high
    if low is not None or high is not None:
        under, over = _out_of_bounds(ratio, low, high)
        # a token that an earlier stage dropped must not drop its sequence too
        under, over = (under & (mask > 0)).any(1, keepdim=True), (over & (mask > 0)).any(1, keepdim=True)
        mask = _drop_sequences("outlier_seq", under, over, mask, metrics)
    if (limit := cfg.sequence_error_high) is not None:
        error = masked_mean(clamped_ratio(log_ratio.abs()), mask, dim=1)[:, None]
        over = (error > limit) & (mask > 0).any(1, keepdim=True)
        mask = _drop_sequences("sequence_error", torch.zeros_like(over), over, mask, metrics)
    low, high = cfg.token_mask_is_threshold_low, cfg.token_mask_is_threshold_high
    if low is not None or high is not None:
        under, over = _out_of_bounds(ratio, low, high)
        metrics["token_mask_ratio"] = token_mean(under | over, mask)
        # a product, not torch.where: it keeps the dtype of the mask, as Correction promises
        mask = mask * ~(under | over)
    if cfg.tis_ratio_type is not None:
        weight = _truncated_weight(log_ratio, mask, cfg, metrics)
    # after the weight, which is therefore computed on sequences that this stage then drops
    if cfg.sequence_mask_metric is not None:
        mask = _sequence_mask(log_ratio, mask, cfg, metrics)
    return Correction(mask, weight, metrics)


def effective_mask(
    old_log_probs: Tensor | None, rollout_log_probs: Tensor | None, loss_mask: Tensor, cfg: Any
) -> Tensor:
    """Return the mask [B, T] of the tokens that remain after all masks. Loss denominators count these tokens.

    Rows do not affect each other. Raises AlgorithmError if the masks need log-probs that are missing.
    """
    if not masks_enabled(cfg):
        return loss_mask
    if old_log_probs is None:
        raise AlgorithmError(
            "the masks of trainer.algorithm.off_policy_correction need old_log_probs: compute them before the update"
        )
    return correct(old_log_probs, rollout_log_probs, loss_mask, cfg).mask


def _truncated_weight(log_ratio: Tensor, mask: Tensor, cfg: Any, metrics: ReducibleMetrics) -> Tensor:
    """Return min(r, cap) of each token [B, T], or of the product over a sequence [B, 1]."""
    if cfg.tis_ratio_type == "token":
        ratio, cap = clamped_ratio(log_ratio), cfg.token_tis_ratio_clip_high
        metrics["tis_token_clip_high_ratio"] = token_mean(ratio > cap, mask)
    elif cfg.tis_ratio_type == "sequence":
        # the product as a sum of logarithms: it would leave fp32's range for long sequences
        ratio = clamped_ratio(keep_masked(log_ratio, mask).sum(1, keepdim=True))
        cap = cfg.sequence_tis_ratio_clip_high
        metrics["tis_seq_clip_high_ratio"] = _share_of_sequences(ratio > cap, mask)
    else:
        raise AlgorithmError(f"off_policy_correction.tis_ratio_type={cfg.tis_ratio_type!r}: choose token or sequence")
    return ratio.clamp(max=cap)


def _sequence_mask(log_ratio: Tensor, mask: Tensor, cfg: Any, metrics: ReducibleMetrics) -> Tensor:
    """Drop the sequences whose product, or geometric mean, of r is out of bounds; return the mask."""
    total = keep_masked(log_ratio, mask).sum(1, keepdim=True)
    if cfg.sequence_mask_metric == "geometric":
        name, low, high = "geo_sequence_mask", cfg.geo_mask_low, cfg.geo_mask_high
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    elif cfg.sequence_mask_metric == "product":
        name, low, high = "product_sequence_mask", cfg.product_mask_low, cfg.product_mask_high
    else:
        raise AlgorithmError(
            f"off_policy_correction.sequence_mask_metric={cfg.sequence_mask_metric!r}: choose product or geometric"
        )
    under, over = _out_of_bounds(clamped_ratio(total), low, high)
    return _drop_sequences(name, under, over, mask, metrics)


def _out_of_bounds(ratio: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Return where ``ratio`` is below ``low`` and where it is above ``high``; None means no bound."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return never if low is None else ratio < low, never if high is None else ratio > high


def _drop_sequences(name: str, under: Tensor, over: Tensor, mask: Tensor, metrics: ReducibleMetrics) -> Tensor:
    """Drop the sequences marked in ``under`` or ``over`` [B, 1]; return the mask and add the dropped shares to
    ``metrics``."""
    metrics[f"{name}_masked_ratio"] = _share_of_sequences(under | over, mask)
    metrics[f"{name}_over_high_ratio"] = _share_of_sequences(over, mask)
    metrics[f"{name}_under_low_ratio"] = _share_of_sequences(under, mask)
    return mask * ~(under | over)


def _share_of_sequences(marked: Tensor, mask: Tensor) -> Mean:
    """Return the share of ``marked`` [B, 1] sequences among those with a valid token."""
    valid = (mask > 0).any(dim=1)
    return token_mean(marked.squeeze(1), valid)
