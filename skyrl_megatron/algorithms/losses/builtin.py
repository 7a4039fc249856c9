"""What all built-in losses share: checks, masking, off-policy correction. The rest of a loss is its formula.

A formula takes (log_probs, old_log_probs, advantages, config, mask, rollout), where ``mask`` is the loss mask,
``rollout`` the engine's log-probs or None, and every tensor is [B, T] and 0 wherever the mask is. It returns the loss
of each token with metrics.
:func:`builtin_loss` turns it into a registered function, which

* accepts padding that holds anything, NaN included: it gets exactly 0, and so does its gradient,
* gives the loss of tokens dropped by the off-policy correction exactly 0 and weights the others, if ``corrected``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from skyrl_megatron.algorithms.checks import check_token_tensors
from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.algorithms.off_policy import correct
from skyrl_megatron.config.schema.algorithm import correction_enabled
from skyrl_megatron.errors import AlgorithmError

type Formula = Callable[[Tensor, Tensor, Tensor, Any, Tensor, Tensor | None], tuple[Tensor, ReducibleMetrics]]


class BuiltinLoss(Protocol):
    """A registered built-in loss and what is known about it."""

    corrected: bool
    """Applies ``off_policy_correction``."""
    uses_old: Callable[[Any], bool]
    """Whether, with this config, its formula reads ``old_log_probs``. (The correction does, too.)"""
    depends_on_cut: bool
    """Uses statistics of the micro-batch that it is given."""
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


def always(config: Any) -> bool:
    """Return True: for losses that read the old log-probs."""
    return True


def never(config: Any) -> bool:
    """Return False: for losses that do not read the old log-probs."""
    return False


def nothing_clipped(mask: Tensor) -> ReducibleMetrics:
    """Return ``clip_ratio`` 0, for losses that clip nothing."""
    return {"clip_ratio": token_mean(torch.zeros_like(mask, dtype=torch.bool), mask)}


def require_rollout(name: str, rollout: Tensor | None) -> Tensor:
    """Return the engine's log-probs. Raises AlgorithmError where they are missing."""
    if rollout is None:
        raise AlgorithmError(f"{name} needs the engine's log-probs: set generator.sampling_params.logprobs=1")
    return rollout


def builtin_loss(
    *, corrected: bool = True, uses_old: Callable[[Any], bool] = always, depends_on_cut: bool = False
) -> Callable[[Formula], BuiltinLoss]:
    """Make a formula a policy loss with the signature of the registry (a decorator)."""

    def decorate(formula: Formula) -> BuiltinLoss:
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
            cfg = getattr(config, "off_policy_correction", None) if corrected else None
            if old_log_probs is None:
                if uses_old(config) or correction_enabled(cfg):
                    raise AlgorithmError(f"the policy loss {formula.__name__} needs old_log_probs with this config")
                old_log_probs = torch.zeros_like(log_probs)  # not read
            old = keep_masked(old_log_probs, mask)
            rollout = None if rollout_log_probs is None else keep_masked(rollout_log_probs, mask)
            values, metrics = formula(
                keep_masked(log_probs, mask), old, keep_masked(advantages, mask), config, mask, rollout
            )
            correction = correct(old, rollout, mask, cfg)
            if correction.weight is not None:
                values = values * correction.weight
            return keep_masked(values, correction.mask), metrics | correction.metrics

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(loss, name, getattr(formula, name))
        registered = cast(BuiltinLoss, loss)
        registered.corrected, registered.uses_old, registered.depends_on_cut = corrected, uses_old, depends_on_cut
        return registered

    return decorate
