"""How a registered estimator is run: check the input, call it, check what it returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.groups import Index
from skyrl_megatron.algorithms.checks import check_mask, check_token_tensors, finite_rows
from skyrl_megatron.errors import AlgorithmError

type Estimator = Callable[..., tuple[Tensor, Tensor]]

NEEDS_WHOLE_TRAJECTORY = ("gae", "reinforce++")


@torch.no_grad()
def run_estimator(
    name: str,
    estimator: Estimator,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    values: Tensor | None,
    nonfinite: str,
    is_last_step: Tensor | None = None,
    loss_mask: Tensor | None = None,
    truncated: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [B, T] of a registered estimator; see ``compute_advantages_and_returns``."""
    tensors = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "values": values}
    check_token_tensors("token_level_rewards", **tensors, loss_mask=loss_mask)
    check_mask("response_mask", response_mask)
    if loss_mask is not None:
        check_mask("loss_mask", loss_mask)
    uids = index if isinstance(index, Tensor) else np.asarray(index)
    rows = len(token_level_rewards)
    if len(uids) != rows:
        raise AlgorithmError(f"index names {len(uids)} sequences, token_level_rewards has {rows} rows")
    if is_last_step is not None:
        if str(name) in NEEDS_WHOLE_TRAJECTORY:
            raise AlgorithmError(f"{name} carries reward through time: it cannot use step-wise trajectories")
        return _stepwise(name, estimator, tensors, uids, is_last_step, nonfinite, options)
    # Only to those that name them: estimators without **kwargs were written before there were such keywords.
    named = inspect.signature(estimator).parameters
    tensors |= {key: each for key, each in {"loss_mask": loss_mask, "truncated": truncated}.items() if key in named}
    whose = uids if isinstance(uids, np.ndarray) else None
    keep = finite_rows("token_level_rewards", token_level_rewards, nonfinite=nonfinite, uids=whose)
    if values is not None:
        keep &= finite_rows("values", values, nonfinite=nonfinite, uids=whose)
    if bool(keep.all()):
        result = estimator(**tensors, index=uids, **options)
        return _checked(name, result, token_level_rewards.shape)
    # A sample left out must not affect its group either: the estimator sees the others only.
    kept = {key: None if tensor is None else tensor[keep] for key, tensor in tensors.items()}
    result = estimator(**kept, index=uids[keep if isinstance(uids, Tensor) else keep.numpy(force=True)], **options)
    parts = _checked(name, result, torch.Size([int(keep.sum()), token_level_rewards.shape[1]]))
    advantages, returns = (part.new_zeros(token_level_rewards.shape).index_put((keep,), part) for part in parts)
    return advantages, returns


def _stepwise(
    name: str,
    estimator: Estimator,
    tensors: dict[str, Tensor | None],
    uids: np.ndarray | Tensor,
    is_last_step: Tensor,
    nonfinite: str,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Give all rows of a trajectory the advantage of its last one: a row is a step, and the last has the reward.

    The estimator runs on the last rows with a mask of ones, so that its (constant) advantage stands in every column.
    """
    rewards, mask = tensors["token_level_rewards"], tensors["response_mask"]
    assert rewards is not None and mask is not None
    last = is_last_step.to(rewards.device, torch.bool)
    if last.shape != (len(rewards),) or not bool(last[-1:].all()):
        raise AlgorithmError(
            f"is_last_step must be [B] = [{len(rewards)}] and end with a last step, got shape {tuple(last.shape)}"
        )
    trajectory = last.cumsum(0) - last.long()  # [B] number of the trajectory that a row belongs to
    values = tensors["values"]
    advantages, returns = run_estimator(
        name,
        estimator,
        token_level_rewards=rewards[last],
        response_mask=torch.ones_like(rewards[last]),
        index=uids[last if isinstance(uids, Tensor) else last.numpy(force=True)],
        values=None if values is None else values[last],
        nonfinite=nonfinite,
        **options,
    )
    spread = mask.to(rewards.dtype)
    return advantages[trajectory] * spread, returns[trajectory] * spread


def _checked(name: str, result: object, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) as returned. Raises AlgorithmError when they are not two [B, T] tensors."""
    wanted = f"the advantage estimator {str(name)!r} must return (advantages, returns), both floating {list(shape)}"
    if not isinstance(result, tuple | list) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise AlgorithmError(f"{wanted}; got {got}")
    for what, tensor in zip(("advantages", "returns"), result, strict=True):
        if not isinstance(tensor, Tensor):
            raise AlgorithmError(f"{wanted}; {what} is {type(tensor).__name__}")
        if tensor.shape != shape or not tensor.is_floating_point():
            raise AlgorithmError(f"{wanted}; {what} is {tensor.dtype} {list(tensor.shape)}")
    advantages, returns = result
    return advantages, returns
