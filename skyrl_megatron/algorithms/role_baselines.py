"""RAE, role-conditioned advantage estimation for self-play (SPIRAL, arXiv:2506.24119).

In a zero-sum game the mean over all roles is 0 whatever the policy does. Each role has its own baseline, an
exponential moving mean of its rewards, so that an advantage says whether the policy did better than it usually does in
this role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.estimator_state import EstimatorState
from skyrl_megatron.errors import AlgorithmError

if TYPE_CHECKING:
    from skyrl_megatron.config import AlgorithmConfig


class RoleBaselines(EstimatorState):
    """The running mean reward of each role, which the estimator ``rae`` subtracts and updates."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        super().__init__(algorithm)
        self.means: dict[str, float] = {}
        """Role → mean reward."""

    def arguments(self, roles: Callable[[], list[str]]) -> dict[str, Any]:
        """See :class:`EstimatorState`."""
        # Not a copy: the estimator updates it.
        return {"roles": roles(), "baselines": self.means}

    def state(self) -> dict[str, Any]:
        """See :class:`EstimatorState`."""
        # A copy: the steps after a checkpoint change the means.
        return {"role_baselines": dict(self.means)} if self.means else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`EstimatorState`."""
        self.means = dict(state.get("role_baselines") or {})


@torch.no_grad()
def rae_scores(
    scores: Tensor,
    roles: Sequence[str],
    baselines: MutableMapping[str, float],
    decay: float,
    trained: Tensor | None = None,
) -> Tensor:
    """Return [B], dtype of ``scores`` [B]: score − baseline of the role, and update ``baselines`` (role → mean, 0
    before its first score).

    Rows are taken in order: A = R − b, then b ← decay·b + (1 − decay)·R. The baseline does not contain the score that
    it is compared with. Rows that are not ``trained`` [B] bool get 0 and do not count.
    """
    # Python floats, as each baseline depends on the rows before; tolist copies from the device once.
    advantages = torch.zeros(len(scores), dtype=torch.float64)
    counted = [True] * len(scores) if trained is None else trained.tolist()
    for row, (score, role, counts) in enumerate(zip(scores.double().tolist(), roles, counted, strict=True)):
        if counts:
            baseline = baselines.get(role, 0.0)
            advantages[row] = score - baseline
            baselines[role] = decay * baseline + (1 - decay) * score  # after its use: a score is no part of its mean
    return advantages.to(scores.device, scores.dtype)


def rae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    roles: Sequence[str] | None = None,
    baselines: MutableMapping[str, float] | None = None,
    loss_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Spread :func:`rae_scores` of the summed rewards [B, T] over the response: [B, T], one tensor for both.

    ``roles`` [B]: role of each row. ``baselines``: state of the run, which is updated. Raises AlgorithmError without
    them.
    """
    if roles is None or baselines is None or len(roles) != len(token_level_rewards):
        raise AlgorithmError("the estimator rae needs roles [B] and baselines, which the trainer passes")
    trained = None if loss_mask is None else (loss_mask > 0).any(dim=1)
    scores = rae_scores(token_level_rewards.sum(dim=1), roles, baselines, config.rae_decay, trained)
    advantages = scores[:, None] * response_mask.to(token_level_rewards.dtype)
    return advantages, advantages
