"""The call of a registered policy loss, built-in or custom.

A custom loss takes ``(log_probs, old_log_probs, advantages, config)``, optionally ``loss_mask`` and the engine's
log-probs, spelt ``rollout_log_probs`` or ``rollout_logprobs``, and returns a pair:

* ``(loss of each token [B, T], metrics)``: masked and averaged like a built-in one; or
* ``(scalar, metrics)``: the mean over the micro-batch that it was given. It counts in proportion to the micro-batch:
  by valid tokens, or by sequences for ``loss_reduction`` ``sequence_mean`` and ``prompt_mean``. Such a loss depends on
  how the batch is cut; a warning says so, once.

Metrics are a number (the clip ratio) or a dict of numbers, each the mean over the tokens of the micro-batch unless its
name ends in ``_min`` or ``_max``; scalar tensors and (sum, count) pairs are accepted, too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import Mean, ReducibleMetrics
from skyrl_megatron.errors import AlgorithmError, SkyRLMegatronWarning

OPTIONAL = {"loss_mask": "loss_mask", "rollout_log_probs": "rollout", "rollout_logprobs": "rollout"}

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Issue a SkyRLMegatronWarning, once a process for each message."""
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
    """Call a policy loss: return the loss of each token [B, T], or a scalar, with metrics in their reducible form.

    Raises AlgorithmError (a ValueError) when the function cannot be called like this, or returns something else.
    """
    optional = {"loss_mask": loss_mask, "rollout": rollout_log_probs}
    keywords = {spelling: optional[kind] for spelling, kind in accepted_keywords(name, function).items()}
    result = function(log_probs, old_log_probs, advantages, config, **keywords)
    loss, metrics = _checked_pair(name, result, log_probs)
    if loss.ndim == 2:
        loss = keep_masked(loss, loss_mask)
    else:
        warn_once(
            f"the policy loss {name!r} returns a scalar: it counts as the mean over its micro-batch, so that loss and"
            " gradient depend on how the batch is cut. Return the loss of each token to avoid that"
        )
    return loss, reducible(name, metrics, loss_mask)


def accepted_keywords(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the optional arguments that ``function`` takes: its spelling → ``loss_mask`` or ``rollout``.

    Raises AlgorithmError when it has fewer than four parameters, or requires another argument.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature: offer the full contract
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
    """Return (loss, metrics) as the function gave them. Raises AlgorithmError with what came instead."""
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
    if torch.is_grad_enabled() and log_probs.requires_grad and not loss.requires_grad:
        raise AlgorithmError(f"{wanted}; the loss has no gradient: it must be computed from log_probs")
    return loss, metrics


def reducible(name: str, metrics: object, loss_mask: Tensor) -> ReducibleMetrics:
    """Return a custom loss's metrics in the form of ``metrics.py``: a number weighs as many tokens as it covers."""
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
                f"the policy loss {name!r} returned the metric {key!r} = {type(value).__name__}: a number is needed"
            )
    return reduced
