"""SAPO (arXiv:2511.20347): a soft gate in place of the clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.losses.builtin import builtin_loss, nothing_clipped
from skyrl_megatron.algorithms.metrics import ReducibleMetrics
from skyrl_megatron.algorithms.off_policy import clamped_ratio


@builtin_loss()
def sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, mask: Tensor, rollout: Tensor | None
) -> tuple[Tensor, ReducibleMetrics]:
    """Return -g·A with the soft gate g = σ(τ(r - 1))·4/τ in place of the ratio r.

    τ is ``tau_pos`` where A > 0, else ``tau_neg``. Meant for ``loss_reduction=sequence_mean``.
    """
    ratio = clamped_ratio(log_probs - old_log_probs)
    temperature = torch.full_like(ratio, config.sapo.tau_neg).masked_fill(advantages > 0, config.sapo.tau_pos)
    gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
    return -gate * advantages, nothing_clipped(mask)
