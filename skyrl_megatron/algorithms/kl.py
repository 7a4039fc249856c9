"""KL estimators from samples, the KL penalty in the reward, and the controllers of the KL coefficient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.groups import Trajectories
from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.types import RowSpans


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, loss_mask: Tensor | None = None, kl_estimator_type: str = "k3"
) -> Tensor:
    """Estimate KL(policy ‖ base) per token, [B, T] in nats, from tokens that the policy sampled; 0 where masked.

    With d = log_probs - log_probs_base, all [B, T]: ``k1`` d, ``abs`` |d|, ``k2`` d²/2, ``k3`` exp(-d) + d - 1 with d
    clamped to ±20 and the result to at most 10 (joschu.net/blog/kl-approx.html). Differentiable in ``log_probs``.
    Raises AlgorithmError for any other ``kl_estimator_type``.
    """
    # masked first: log-probs of padding may be NaN, and NaN · 0 is NaN
    difference = keep_masked(log_probs - log_probs_base, loss_mask)
    match kl_estimator_type:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            # fp32's exp overflows at 89: one token with a wrong log-prob would make the loss infinite. The
            # bounds are verl's. Beyond them the gradient is 0.
            opposite = (-difference).clamp(-20, 20)
            return (opposite.exp() - opposite - 1).clamp(max=10)
    raise AlgorithmError(f"kl_estimator_type={kl_estimator_type!r}: choose k1, k2, k3 or abs")


class FixedKLController:
    """A constant coefficient, ``value``."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing: the coefficient is fixed."""


class AdaptiveKLController:
    """A coefficient that adapts until the measured KL reaches ``target`` (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update ``value`` from ``n_steps`` samples with mean KL ``current``, by at most 20 % · n_steps/horizon."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(algorithm_cfg: Any) -> FixedKLController | AdaptiveKLController:
    """Make the controller of ``algorithm.kl_ctrl``. Its initial value is ``algorithm.kl_loss_coef``."""
    control, start = algorithm_cfg.kl_ctrl, algorithm_cfg.kl_loss_coef
    if control.type == "fixed":
        return FixedKLController(start)
    if control.type != "adaptive":
        raise AlgorithmError(f"trainer.algorithm.kl_ctrl.type={control.type!r}: choose fixed or adaptive")
    if control.horizon <= 0:
        raise AlgorithmError(f"trainer.algorithm.kl_ctrl.horizon={control.horizon}: must be above 0")
    return AdaptiveKLController(start, control.kl_target, control.horizon)


@torch.no_grad()
def penalize_rewards(
    rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    kl_coef: float,
    kl_estimator_type: str = "k3",
    trajectories: Trajectories | None = None,
    *,
    rows: RowSpans,
) -> tuple[Tensor, ReducibleMetrics]:
    """Subtract ``kl_coef`` (at least 0) times the KL from ``rewards``, [R] (``algorithm.use_kl_in_reward``). All
    tensors are the flat values of ``rows``.

    Returns (rewards [R], metrics). ``avg_kl`` is the mean over ``trajectories`` (None: the rows) of their mean
    token KL; it updates the controller. ``avg_kl_max`` is the mean over trajectories of their largest token KL. Both
    leave out trajectories without a trained token.
    """
    kl = compute_approx_kl(log_probs, ref_log_probs, loss_mask, kl_estimator_type)
    samples = trajectories or Trajectories(None, len(rows))
    counts = samples.sum(rows.sum(loss_mask))
    trained = (counts > 0).double()
    # tokens of all rows of a trajectory count alike: the mean of its rows' means would favour short turns
    means = samples.sum(rows.sum(kl)) / counts.clamp(min=1)
    # at least 0: a row without tokens has no largest value
    largest = samples.largest(rows.largest(kl.abs()).clamp(min=0)).double()
    metrics: ReducibleMetrics = {
        "avg_kl": Mean((means * trained).sum(), trained.sum()),
        "avg_kl_max": Mean((largest * trained).sum(), trained.sum()),
    }
    # an adaptive coefficient turns negative if n_steps exceeds 5 · horizon, and would then reward distance
    return rewards - max(0.0, kl_coef) * kl, metrics
