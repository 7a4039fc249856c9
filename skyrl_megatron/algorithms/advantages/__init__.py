"""Advantage estimators: ``fn(token_level_rewards [B, T], response_mask [B, T], index [B], **kwargs)`` →
``(advantages [B, T], returns [B, T])``.

``index`` holds the uid of each row's prompt. Keywords passed on: ``values``, ``grpo_norm_by_std``, ``gamma``,
``lambd``, ``config`` and whatever the caller adds; an estimator takes what it needs and ``**kwargs``.

    name                   file
    grpo                   grpo.py (``grpo_norm_by_std=False``: Dr. GRPO)
    rloo, maxrl, gae       rloo.py, maxrl.py, gae.py
    reinforce++            reinforce.py
    distillation           ../distillation.py

``groups.py`` holds the groups of responses to a prompt, ``trained.py`` leaves out tokens that are not trained,
``normalize.py`` whitens a batch, ``compute.py`` checks input and output of an estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from skyrl_megatron.algorithms.advantages.compute import Estimator, run_estimator
from skyrl_megatron.algorithms.advantages.gae import discounted_suffix_sum, gae
from skyrl_megatron.algorithms.advantages.groups import Groups, Index, varied_rows
from skyrl_megatron.algorithms.advantages.grpo import grpo, grpo_scores
from skyrl_megatron.algorithms.advantages.maxrl import maxrl, maxrl_scores
from skyrl_megatron.algorithms.advantages.normalize import normalize_advantages
from skyrl_megatron.algorithms.advantages.reinforce import reinforce_plus_plus
from skyrl_megatron.algorithms.advantages.rloo import rloo, rloo_scores
from skyrl_megatron.algorithms.distillation import distillation
from skyrl_megatron.algorithms.registry import BaseFunctionRegistry
from skyrl_megatron.config.names import AdvantageEstimator

__all__ = [
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "Groups",
    "compute_advantages_and_returns",
    "discounted_suffix_sum",
    "grpo_scores",
    "maxrl_scores",
    "normalize_advantages",
    "register_advantage_estimator",
    "rloo_scores",
    "varied_rows",
]


class AdvantageEstimatorRegistry(BaseFunctionRegistry):
    """Advantage estimators by name (``algorithm.advantage_estimator``)."""

    _function_type = "advantage estimator"


BUILT_IN: dict[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.GAE: gae,
    AdvantageEstimator.GRPO: grpo,
    AdvantageEstimator.RLOO: rloo,
    AdvantageEstimator.REINFORCE_PP: reinforce_plus_plus,
    AdvantageEstimator.MAXRL: maxrl,
    AdvantageEstimator.DISTILLATION: distillation,
}
AdvantageEstimatorRegistry.add_builtins(AdvantageEstimator, BUILT_IN)


def register_advantage_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Return a decorator that registers a function as the estimator ``name``."""

    def decorate(function: Estimator) -> Estimator:
        AdvantageEstimatorRegistry.register(name, function)
        return function

    return decorate


def compute_advantages_and_returns(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    adv_estimator: str,
    config: Any,
    values: Tensor | None = None,
    grpo_norm_by_std: bool = True,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T] by the estimator of that name, built-in or custom.

    ``token_level_rewards`` [B, T] floating, ``response_mask`` [B, T] in {0, 1}, ``index`` [B] prompt uids, ``values``
    [B, T] for gae, ``config`` the AlgorithmConfig. Further keywords reach the estimator, except these:

    - ``is_last_step`` [B] bool: rows are steps of trajectories, in order, and the advantage of the last step counts
      for all of them (outcome estimators only).
    - ``loss_mask`` [B, T]: the tokens trained on; ``truncated`` [B] bool: the responses that were cut off. They reach
      estimators that have a parameter of that name: gae, and the first one reinforce++.

    Raises AlgorithmError (a ValueError) for an unknown name, shapes, dtypes or masks that do not fit, a wrong return
    of a custom estimator, and rewards or values that are not finite; with ``config.nonfinite == "skip"`` such rows get
    zeros and affect no other row (``checks.finite_rows`` returns which, to mask and to count them).
    """
    return run_estimator(
        adv_estimator,
        AdvantageEstimatorRegistry.get(adv_estimator),
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        values=values,
        nonfinite=getattr(config, "nonfinite", "error"),
        grpo_norm_by_std=grpo_norm_by_std,
        gamma=gamma,
        lambd=lambd,
        config=config,
        **kwargs,
    )
