"""Advantage estimators: GRPO (with ``grpo_norm_by_std=False``: Dr. GRPO), RLOO, REINFORCE++, MaxRL and GAE.

An estimator is ``fn(token_level_rewards [B, T], response_mask [B, T], index [B], **kwargs)`` and returns
``(advantages [B, T], returns [B, T])``. ``index`` holds the uid of each row's prompt. Keyword arguments are
``values``, ``grpo_norm_by_std``, ``gamma``, ``lambd``, ``config`` and those that the caller adds. An estimator names
the ones that it uses and takes the others as ``**kwargs``.

GRPO, RLOO and MaxRL compute advantages from scores, one number per sequence ([B] → [B]). Their registered forms sum
the token rewards to a score and spread the result over the response (:func:`spread_over_response`).

:func:`compute_advantages_and_returns` calls a registered estimator, built-in or custom, and checks its input and
output. ``distillation``, ``gdpo`` and ``rae`` are in ``algorithms/{distillation,gdpo,role_baselines}.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_megatron.algorithms.distillation import distillation
from skyrl_megatron.algorithms.groups import Groups, Index, Trajectories
from skyrl_megatron.algorithms.masked import (
    check_mask,
    check_token_tensors,
    discounted_suffix_sum,
    finite_rows,
    keep_masked,
    masked_mean,
    masked_var,
    masked_whiten,
)
from skyrl_megatron.algorithms.registry import BaseFunctionRegistry
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.table import ESTIMATORS, STEP_WISE, AdvantageEstimator, EstimatorRow, GAEConfig
from skyrl_megatron.errors import AlgorithmError
from skyrl_megatron.types import RowSpans, TrainingBatch

EPSILON = 1e-6


def rows_with_variance(
    scores: Tensor,
    index: Index,
    loss_mask: Tensor | None = None,
    tolerance: float = 1e-6,
) -> Tensor:
    """Return [B] bool: the sequences whose group has reward variance (``algorithm.zero_variance_filter``).

    A group has zero variance if at least two of its responses are trained on (``loss_mask`` [B, T] not all 0) and
    their ``scores`` [B] differ by at most ``tolerance``: group-relative advantages are then 0. Masked responses do not
    count, and a group with fewer than two trained responses stays.
    """
    groups = Groups(index, len(scores), scores.device)
    trained = torch.ones_like(scores, dtype=torch.bool) if loss_mask is None else (loss_mask > 0).any(dim=1)
    spread, count = groups.spread(scores, trained)
    # A tolerance: equal rewards that are spread over tokens in different ways have sums that differ by rounding.
    return ~((count > 1) & (spread <= tolerance))[groups.ids]


def spread_over_response(
    scores: Callable[..., Tensor], rewards: Tensor, mask: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Apply ``scores`` to the summed rewards [B] and spread the result over the response: [B, T], dtype of rewards."""
    advantages = scores(rewards.sum(dim=1), *args, **options)
    return advantages[:, None] * (mask if mask.dtype == rewards.dtype else mask.to(rewards.dtype))


@torch.no_grad()
def normalize_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Scale advantages [B, T] to mean 0 and deviation 1 over the tokens where ``mask`` [B, T] is 1; 0 elsewhere.

    Implements ``algorithm.advantage_batch_normalize``. Padding does not affect the result. The variance is biased and
    at least 1e-8. An empty mask gives zeros.
    """
    # First, because NaN in padding would stay NaN in the means: they multiply padding by 0.
    advantages = keep_masked(advantages, mask)
    centred = advantages - masked_mean(advantages, mask)
    # At least 1e-8: of equal advantages the variance is 0, and 0 · rsqrt(0) is NaN.
    variance = masked_mean(centred * centred, mask).clamp(min=1e-8)
    return keep_masked(centred * variance.rsqrt(), mask)


def trained_token_mask(loss_mask: Tensor | None, config: Any) -> Tensor | None:
    """Return ``loss_mask`` [B, T] if an estimator that propagates reward through time skips the tokens outside it
    (``algorithm.skip_untrained_tokens``), else None."""
    return loss_mask if getattr(config, "skip_untrained_tokens", True) else None


class RightAlignedTokens:
    """Maps the trained tokens of each row to its right end, in their order, as if the row had no other tokens.

    ``mask`` [B, T] is 1 on trained tokens. ``moved`` [B, T] is the mask after the move.
    """

    __slots__ = ("_place", "_trained", "moved")

    def __init__(self, mask: Tensor) -> None:
        self._trained = mask > 0
        following = self._trained.flip(1).cumsum(1).flip(1)  # [B, T] trained tokens from here on
        # New position of a trained token. Any other token gets that of the trained token before it.
        # Tokens before the first trained one get the column left of the moved tokens, which `moved` leaves out. It
        # exists: a row that has such a token has less than T trained ones.
        self._place = mask.shape[1] - following - (~self._trained).long()
        self.moved = self.move(mask)

    @classmethod
    def if_not_right_aligned(cls, mask: Tensor) -> RightAlignedTokens | None:
        """Return the mapping, or None if the trained tokens of every row are at its right end already."""
        return None if bool((mask[:, 1:] >= mask[:, :-1]).all()) else cls(mask)

    def move(self, x: Tensor) -> Tensor:
        """Move the values of trained tokens; all others become 0."""
        return self.credit(torch.where(self._trained, x, 0.0))

    def credit(self, rewards: Tensor) -> Tensor:
        """Move rewards. The reward of an untrained token is added to the trained token before it, whose action
        earned it."""
        # Added, as several untrained tokens may follow one trained token: scatter_ would keep one of their rewards.
        return torch.zeros_like(rewards).scatter_add_(1, self._place, rewards)

    def back(self, x: Tensor) -> Tensor:
        """Move values back to their tokens, with 0 at untrained tokens."""
        return torch.where(self._trained, x.gather(1, self._place), 0.0)


type Estimator = Callable[..., tuple[Tensor, Tensor]]


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
    reward_parts: Tensor | None = None,
    roles: Sequence[str] | None = None,
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
    parts: dict[str, Tensor | None] = {} if reward_parts is None else {"reward_parts": reward_parts}
    if is_last_step is not None:
        if (row := ESTIMATORS.get(name)) is not None and STEP_WISE in row.refuses:
            raise AlgorithmError(f"the advantage estimator {name} {row.refuses[STEP_WISE]}")
        options |= {"loss_mask": loss_mask, "truncated": truncated, "nonfinite": nonfinite}
        return _of_trajectories(name, estimator, tensors | parts, uids, is_last_step, options)
    # Only for estimators that name them: custom ones without **kwargs may be older than these keywords.
    named = inspect.signature(estimator).parameters
    masks = {"loss_mask": loss_mask, "truncated": truncated}
    tensors |= {key: tensor for key, tensor in (masks | parts).items() if key in named}
    whose = uids if isinstance(uids, np.ndarray) else None
    keep = finite_rows("token_level_rewards", token_level_rewards, nonfinite=nonfinite, uids=whose)
    if values is not None:
        keep &= finite_rows("values", values, nonfinite=nonfinite, uids=whose)
    if roles is not None:
        # Roles are a list, which the selection of rows from the tensors below does not reach.
        options["roles"] = [role for role, kept in zip(roles, keep.tolist(), strict=True) if kept]
    if bool(keep.all()):
        result = estimator(**tensors, index=uids, **options)
        return _checked(name, result, token_level_rewards.shape)
    # A skipped row must not affect its group either, so the estimator gets only the other rows.
    kept = {key: None if tensor is None else tensor[keep] for key, tensor in tensors.items()}
    result = estimator(**kept, index=uids[keep if isinstance(uids, Tensor) else keep.numpy(force=True)], **options)
    both = _checked(name, result, torch.Size([int(keep.sum()), token_level_rewards.shape[1]]))
    advantages, returns = (part.new_zeros(token_level_rewards.shape).index_put((keep,), part) for part in both)
    return advantages, returns


def _of_trajectories(
    name: str,
    estimator: Estimator,
    tensors: dict[str, Tensor | None],
    uids: np.ndarray | Tensor,
    is_last_step: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Give all rows of a trajectory the advantage of the trajectory.

    The estimator sees one row for each: the trajectory's reward at the last token, and masks of ones, so that every
    column holds its (constant) advantage. ``loss_mask`` is 0 for a trajectory without a trained token.
    """
    rewards, mask = tensors["token_level_rewards"], tensors["response_mask"]
    assert rewards is not None and mask is not None
    trajectories = Trajectories(is_last_step, len(rewards), rewards.device)
    last, columns = trajectories.last, rewards.shape[1]
    totals = rewards.new_zeros(len(trajectories), columns)
    # In one column, as an outcome estimator sums over a row.
    totals[:, -1] = trajectories.sum(rewards.sum(dim=1))
    if (loss_mask := options["loss_mask"]) is not None:
        trained = trajectories.any((loss_mask > 0).any(dim=1))
        options["loss_mask"] = trained[:, None].to(rewards.dtype).expand(-1, columns)
    rows = {key: tensors.get(key) for key in ("values", "reward_parts")} | {"truncated": options["truncated"]}
    options |= {key: None if value is None else value[last] for key, value in rows.items()}
    advantages, returns = run_estimator(
        name,
        estimator,
        token_level_rewards=totals,
        response_mask=torch.ones_like(totals),
        index=uids[last if isinstance(uids, Tensor) else last.numpy(force=True)],
        **options,
    )
    spread = mask.to(rewards.dtype)
    return advantages[trajectories.ids] * spread, returns[trajectories.ids] * spread


def _checked(name: str, result: object, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of an estimator. Raises AlgorithmError if they are not two [B, T] tensors."""
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


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    """Return [B] float64: λ = 1 − 1/(α·l) for a response of l tokens, at least 0 (VAPO, arXiv:2504.05118,
    length-adaptive GAE).

    The sum of the weights of the temporal-difference errors, Σ λ^t ≈ 1/(1 − λ) = α·l, then grows with the response.
    """
    # In float64: the sum of a bf16 mask is rounded above 256. At least 1: a row without tokens would divide by 0.
    length = response_mask.sum(dim=1, dtype=torch.float64).clamp(min=1)
    # λ of a response shorter than 1/α would be negative.
    return (1 - 1 / (alpha * length)).clamp(min=0)


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    config: Any = None,
    loss_mask: Tensor | None = None,
    truncated: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages from the critic's values; return them whitened over the response, and the returns A + V.

    δ_t = r_t + γV_{t+1} - V_t and A_t = δ_t + γλA_{t+1} over all of T. Padding is at the left, so it affects no other
    token. ``config.gae`` can set a separate λ for the returns (``critic_lambd``) and a λ for the advantages that
    depends on the length of the response (``length_adaptive_alpha``).

    With ``loss_mask`` [B, T], unless ``config.skip_untrained_tokens`` is false, t + 1 is the next trained token, and
    only trained tokens are whitened, as the critic learns no values of other tokens. The reward of an untrained token
    is added to the trained token before it. The value after the last token is 0. With
    ``config.gae.bootstrap_truncated`` it is the value at the last token in rows that are ``truncated`` [B].

    Ignore the entries of the result outside the mask. Raises AlgorithmError without ``values`` [B, T], for a λ or γ
    outside [0, 1], or if fewer than two tokens are valid; with ``loss_mask`` such advantages are 0.
    """
    advantages, returns = gae_sums(
        token_level_rewards,
        response_mask,
        values=values,
        gamma=gamma,
        lambd=lambd,
        config=config,
        loss_mask=loss_mask,
        truncated=truncated,
    )
    return whitened_gae(advantages, response_mask, trained_token_mask(loss_mask, config)), returns


def whitened_gae(advantages: Tensor, response_mask: Tensor, counted: Tensor | None) -> Tensor:
    """Whiten the advantages of :func:`gae_sums` in place, over the ``counted`` tokens, or over the response if that is
    None. All tensors have one shape."""
    mask = response_mask if counted is None else counted
    if counted is not None and mask.sum() < 2:  # no trained token, or one that equals its mean
        return advantages.zero_()
    scale = torch.rsqrt(masked_var(advantages, mask) + 1e-8)
    return advantages.sub_(masked_mean(advantages, mask)).mul_(scale)


def gae_sums(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    config: Any = None,
    loss_mask: Tensor | None = None,
    truncated: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the advantages before whitening, and the returns, [B, T] each. The arguments are those of :func:`gae`."""
    if values is None:
        raise AlgorithmError(
            "the estimator gae needs values: set trainer.critic.model.path, or choose another"
            " trainer.algorithm.advantage_estimator"
        )
    settings = getattr(config, "gae", None) or GAEConfig()
    critic_lambd = lambd if settings.critic_lambd is None else settings.critic_lambd
    for name, factor in (("lambd", lambd), ("gae.critic_lambd", critic_lambd), ("gamma", gamma)):
        if not 0 <= factor <= 1:
            raise AlgorithmError(f"trainer.algorithm.{name}={factor}: must be between 0 and 1")
    mask, trained = response_mask, None
    if (counted := trained_token_mask(loss_mask, config)) is not None:
        mask, trained = counted, RightAlignedTokens.if_not_right_aligned(counted)
    if trained is not None:
        token_level_rewards, values, mask = trained.credit(token_level_rewards), trained.move(values), trained.moved
    # δ_t = r_t + γ·V_{t+1} − V_t (arXiv:1707.06347, equation 12), in a new tensor: what follows changes it in place.
    deltas = token_level_rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    if settings.bootstrap_truncated and truncated is not None:
        # Responses end in the last column, so that it has the value of a row's last token.
        deltas[:, -1].add_(values[:, -1] * truncated, alpha=gamma)
    alpha = settings.length_adaptive_alpha
    policy_lambd = lambd if alpha is None else length_adaptive_lambda(mask, alpha)
    # A_t = δ_t + γλ·δ_{t+1} + … (equation 11).
    advantages = discounted_suffix_sum(deltas, gamma * policy_lambd)
    same = alpha is None and critic_lambd == lambd
    returns = advantages if same else discounted_suffix_sum(deltas, gamma * critic_lambd)
    # Not in place: `returns` may be the advantages, which are whitened after this. `deltas` is not read any more.
    returns = torch.add(returns, values, out=deltas)
    return (advantages, returns) if trained is None else (trained.back(advantages), trained.back(returns))


@torch.no_grad()
def grpo_scores(scores: Tensor, index: Index, norm_by_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """Return the deviation from the group's mean [B], divided by (unbiased std + ε) if ``norm_by_std``.

    A group of one response uses mean 0 and std 1. arXiv:2402.03300, section 4.1.2; without std arXiv:2503.20783 (Dr.
    GRPO).
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    # In float64: the difference of large rewards that are nearly equal has few digits in fp32.
    deviations = scores.double() - groups.mean(scores).masked_fill(alone, 0.0)[groups.ids]
    if norm_by_std:
        # Of a group of one, the deviation is its score, whose square is no variance.
        std = groups.std(deviations.masked_fill(alone[groups.ids], 0.0)).masked_fill(alone, 1.0)
        # ε: in a group of equal rewards 0/0 would be NaN.
        deviations = deviations / (std + epsilon)[groups.ids]
    return deviations.to(scores.dtype)


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = EPSILON,
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Spread :func:`grpo_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = spread_over_response(
        grpo_scores, token_level_rewards, response_mask, index, grpo_norm_by_std, epsilon
    )
    return advantages, advantages


@torch.no_grad()
def maxrl_scores(scores: Tensor, index: Index, epsilon: float = EPSILON) -> Tensor:
    """Return [B]: the deviation from the group's mean, divided by (mean |score| + ε); in a group of one the score.

    For non-negative rewards mean |score| is the mean of MaxRL. The mean of rewards of both signs can be near 0 or
    negative, and dividing by it would make advantages huge or reverse them.
    """
    groups = Groups(index, len(scores), scores.device)
    alone = groups.sizes == 1
    baseline = groups.mean(scores).masked_fill(alone, 0.0)
    # ε: a group whose rewards are all 0 would divide by 0.
    scale = (groups.mean(scores.abs()) + epsilon).masked_fill(alone, 1.0)
    return ((scores.double() - baseline[groups.ids]) / scale[groups.ids]).to(scores.dtype)


def maxrl(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = EPSILON, **_: Any
) -> tuple[Tensor, Tensor]:
    """Spread :func:`maxrl_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = spread_over_response(maxrl_scores, token_level_rewards, response_mask, index, epsilon)
    return advantages, advantages


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    config: Any = None,
    loss_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return discounted returns, and as advantages the same whitened over the response and masked, [B, T] each.

    The sum at a token stops before the next token outside the mask: ``y_t = r_t + γ·mask_{t+1}·y_{t+1}``. With
    ``loss_mask`` [B, T], unless ``config.skip_untrained_tokens`` is false, t + 1 is the next trained token, and only
    trained tokens are whitened. Raises AlgorithmError if fewer than two tokens are valid; with ``loss_mask`` such
    advantages are 0.
    """
    sums = reinforce_plus_plus_sums(
        token_level_rewards, response_mask, gamma=gamma, config=config, loss_mask=loss_mask
    )
    returns = sums[0]
    return whitened_returns(returns, response_mask, trained_token_mask(loss_mask, config)), returns


def whitened_returns(returns: Tensor, response_mask: Tensor, counted: Tensor | None) -> Tensor:
    """Return ``returns`` whitened over the ``counted`` tokens, or over the response if that is None, and masked. All
    tensors have one shape."""
    mask = response_mask if counted is None else counted
    # The variance of one token is undefined, and an error here would end a run whose batch is masked by a filter.
    if counted is not None and mask.sum() < 2:
        return torch.zeros_like(returns)
    # Masked again: whitening moves the entries outside the mask away from 0.
    return masked_whiten(returns, mask) * mask


def reinforce_plus_plus_sums(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    config: Any = None,
    loss_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the discounted returns of :func:`reinforce_plus_plus` twice, [B, T]."""
    counted = trained_token_mask(loss_mask, config)
    if counted is None:
        returns = _sums_up_to_gaps(token_level_rewards, response_mask, gamma)
        return returns, returns
    trained = RightAlignedTokens.if_not_right_aligned(counted)
    if trained is None:
        returns = discounted_suffix_sum(token_level_rewards, gamma) * counted
    else:
        returns = trained.back(discounted_suffix_sum(trained.credit(token_level_rewards), gamma))
    return returns, returns


def _sums_up_to_gaps(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    sums = discounted_suffix_sum(token_level_rewards, gamma)
    rows, length = sums.shape
    end = length * torch.ones(rows, 1, dtype=torch.int64, device=sums.device)
    position = torch.arange(length, device=sums.device).expand(rows, -1)
    gaps = torch.cat([torch.where(response_mask > 0, end, position)[:, 1:], end], dim=1)
    stop = gaps.flip(1).cummin(dim=1).values.flip(1)  # first token after t that is outside the mask, or T
    beyond = torch.cat([sums, sums.new_zeros(rows, 1)], dim=1).gather(1, stop)
    # The terms from the gap on, discounted to t, are subtracted. The power is in float64: a float to an int64 tensor
    # would be rounded to fp32.
    return sums - beyond * (gamma ** (stop - position).double()).to(sums.dtype)


@torch.no_grad()
def rloo_scores(scores: Tensor, index: Index) -> Tensor:
    """Return the deviation from the mean of the other responses, (s - mean)·n/(n-1); 0 in a group of one. [B]."""
    groups = Groups(index, len(scores), scores.device)
    # s − mean of the others = (s − mean)·n/(n − 1), arXiv:2402.14740. For n = 1 the clamp avoids x/0, and the last
    # factor makes the advantage 0.
    leave_one_out = groups.sizes / (groups.sizes - 1).clamp(min=1) * (groups.sizes > 1)
    deviations = scores.double() - groups.mean(scores)[groups.ids]
    return (deviations * leave_one_out[groups.ids]).to(scores.dtype)


def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Index, **_: Any) -> tuple[Tensor, Tensor]:
    """Spread :func:`rloo_scores` of the summed rewards over the response: [B, T], one tensor for both."""
    advantages = spread_over_response(rloo_scores, token_level_rewards, response_mask, index)
    return advantages, advantages


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
    "rows_with_variance",
]


class AdvantageEstimatorRegistry(BaseFunctionRegistry):
    """Advantage estimators by name (``algorithm.advantage_estimator``)."""

    _function_type = "advantage estimator"
    _rows = ESTIMATORS


TOKEN_SUMS: dict[Estimator, tuple[Estimator, Callable[[Tensor, Tensor, Tensor | None], Tensor]]] = {
    gae: (gae_sums, whitened_gae),
    reinforce_plus_plus: (reinforce_plus_plus_sums, whitened_returns),
}
"""Built-in estimators that propagate rewards through time, as what they do with each row and then with all tokens."""

BUILT_IN: dict[AdvantageEstimator, Estimator | str] = {
    AdvantageEstimator.GAE: gae,
    AdvantageEstimator.GRPO: grpo,
    AdvantageEstimator.RLOO: rloo,
    AdvantageEstimator.REINFORCE_PP: reinforce_plus_plus,
    AdvantageEstimator.MAXRL: maxrl,
    # by path: loaded by the runs that use them
    AdvantageEstimator.GDPO: "skyrl_megatron.algorithms.gdpo:gdpo",
    AdvantageEstimator.RAE: "skyrl_megatron.algorithms.role_baselines:rae",
    AdvantageEstimator.DISTILLATION: distillation,
}
AdvantageEstimatorRegistry.add_builtins(ESTIMATORS.rows, BUILT_IN)


def register_advantage_estimator(
    name: str,
    *,
    settings: type[BaseConfig] | None = None,
    reads: Iterable[str] | None = None,
    refuses: Mapping[str, str] | None = None,
    per_group: bool = False,
) -> Callable[[Estimator], Estimator]:
    """Return a decorator that registers a function as the estimator ``name``.

    ``per_group``: it compares only responses to one prompt, and is called for each prompt. The padded tensors that it
    sees are then no wider than the longest of these responses; otherwise it sees the whole batch.

    The rest is for the checks of a configuration, and may be left out. ``settings``: dataclass of its section
    ``trainer.algorithm.<name>``. ``reads``: which of the settings that not every estimator reads it uses, such as
    ``gamma``; others are then reported as without effect. ``refuses``: keys that must not be set → what to do.
    """

    def decorate(function: Estimator) -> Estimator:
        # First: it raises for a name that is taken, whose row must then stay.
        AdvantageEstimatorRegistry.register(name, function)
        known = None if reads is None else frozenset(reads)
        row = EstimatorRow(settings=settings, reads=known, critic=None, refuses=refuses or {}, per_group=per_group)
        ESTIMATORS.add(name, row)
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
    """Return advantages and returns [B, T] of the estimator ``adv_estimator``, built-in or custom.

    ``token_level_rewards`` [B, T] floating, ``response_mask`` [B, T] in {0, 1}, ``index`` [B] prompt uids, ``values``
    [B, T] for gae, ``config`` the AlgorithmConfig. Other keyword arguments are passed to the estimator, except these:

    - ``is_last_step`` [B] bool: rows are parts of trajectories, in order. The estimator sees one row for each, whose
      reward is the sum over all its rows, and all of them get its advantage (outcome estimators only).
    - ``loss_mask`` [B, T], the trained tokens, ``truncated`` [B] bool, the responses that were cut off, and
      ``reward_parts`` [B, R]. Only estimators with a parameter of that name get them: gae gets the first two.
    - ``roles`` [B] and ``baselines``, for rae.

    Raises AlgorithmError (a ValueError) for an unknown name, shapes, dtypes or masks that do not match, an invalid
    result of a custom estimator, and rewards or values that are not finite. With ``config.nonfinite == "skip"`` such
    rows get zeros and affect no other row (``masked.finite_rows`` returns them).
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


PADDED_TOKENS = 1 << 22
"""Tokens of rows that built-in estimators look at in padded form at once."""


@torch.no_grad()
def batch_advantages(batch: TrainingBatch, adv_estimator: str, config: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [R] of the rows of a batch, as :func:`compute_advantages_and_returns`, which has
    the errors. ``options``: its other arguments, except the fields of the batch.

    The memory is that of the tokens: built-in estimators see one number per row, or rows of similar lengths. A custom
    estimator sees all rows, padded; one that was registered with ``per_group``, those of one prompt at a time.
    """
    assert batch.rewards is not None
    estimator, nonfinite = AdvantageEstimatorRegistry.get(adv_estimator), getattr(config, "nonfinite", "error")
    rows, uids, keep = batch.responses, batch.uids, torch.ones(len(batch), dtype=torch.bool)
    for name, values in {"token_level_rewards": batch.rewards, "values": batch.values}.items():
        if values is not None:
            keep &= finite_rows(name, values, nonfinite=nonfinite, uids=uids, of=rows)
    arguments = {"adv_estimator": adv_estimator, "config": config, **options}
    if batch.is_last_step is not None:
        arguments["is_last_step"] = batch.is_last_step
    if estimator is distillation:
        return distillation(batch.rewards, batch.response_mask)
    if estimator in TOKEN_SUMS:
        return _by_token_sums(batch, TOKEN_SUMS[estimator], keep, **arguments)
    if estimator in _of_outcomes():
        advantages, returns = compute_advantages_and_returns(
            rows.sum(batch.rewards).to(batch.rewards.dtype)[:, None],
            torch.ones(len(batch), 1),
            uids,
            values=None,
            loss_mask=rows.any(batch.loss_mask)[:, None].float(),
            truncated=batch.truncated,
            reward_parts=batch.reward_parts,
            **arguments,
        )
        both = (advantages,) if returns is advantages else (advantages, returns)
        spread = [rows.spread(values[:, 0]).mul_(batch.response_mask) for values in both]
        return spread[0], spread[-1]
    entry = ESTIMATORS.get(adv_estimator)
    parts = _groups_of(batch) if entry is not None and entry.per_group else [np.arange(len(batch))]
    results = [_padded_estimates(batch, part, arguments) for part in parts]
    order = np.argsort(np.concatenate(parts))
    of_parts = RowSpans(rows.lengths[np.concatenate(parts)])
    advantages, returns = (of_parts.select(torch.cat(values), order) for values in zip(*results, strict=True))
    return advantages, returns


def _of_outcomes() -> set[Estimator]:
    """Return the built-in estimators that read nothing of a row's tokens but the sum of their rewards."""
    return {AdvantageEstimatorRegistry.get(name) for name in BUILT_IN} - {*TOKEN_SUMS, distillation}


def _groups_of(batch: TrainingBatch) -> list[np.ndarray]:
    """Return the rows of each uid, [rows] int64; those of a trajectory, which have one each if it failed, together."""
    groups: dict[str, list[int]] = {}
    trajectories = Trajectories(batch.is_last_step, len(batch))
    for row, last in enumerate(trajectories.last[trajectories.ids].tolist()):
        groups.setdefault(batch.uids[last], []).append(row)
    return [np.asarray(rows, dtype=np.int64) for rows in groups.values()]


def _padded_estimates(batch: TrainingBatch, chosen: np.ndarray, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the estimates [R] of a custom estimator, which sees ``chosen`` [rows] of ``batch`` as padded tensors."""
    part = batch if len(chosen) == len(batch) else batch.select(chosen)
    padded, rows = part.padded(), part.responses
    if (roles := arguments.get("roles")) is not None:
        arguments = {**arguments, "roles": [roles[row] for row in chosen.tolist()]}
    assert padded.rewards is not None
    estimates = compute_advantages_and_returns(
        padded.rewards,
        padded.response_mask,
        padded.uids,
        values=padded.values,
        loss_mask=padded.loss_mask,
        truncated=padded.truncated,
        reward_parts=padded.reward_parts,
        **({**arguments, "is_last_step": padded.is_last_step} if padded.is_last_step is not None else arguments),
    )
    advantages, returns = (rows.flat(values) for values in estimates)
    return advantages, returns


def _by_token_sums(
    batch: TrainingBatch,
    halves: tuple[Estimator, Callable[[Tensor, Tensor, Tensor | None], Tensor]],
    keep: Tensor,
    *,
    adv_estimator: str,
    config: Any,
    is_last_step: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the estimates [R] of a built-in estimator that propagates rewards through time. ``keep`` [B] bool: the
    rows that count; others get 0."""
    assert batch.rewards is not None
    sums, whiten = halves
    if is_last_step is not None:
        refused = ESTIMATORS.rows[adv_estimator].refuses[STEP_WISE]
        raise AlgorithmError(f"the advantage estimator {adv_estimator} {refused}")
    rows, kept = batch.responses, np.flatnonzero(keep.numpy())
    advantages, returns = torch.zeros_like(batch.rewards), torch.zeros_like(batch.rewards)
    shown = [name for name in ("rewards", "response_mask", "values", "loss_mask") if getattr(batch, name) is not None]
    for part in RowSpans(rows.lengths[kept]).of_similar_length(PADDED_TOKENS):
        chosen = kept[part]
        of_part = RowSpans(rows.lengths[chosen])
        dense = {name: of_part.padded(rows.select(getattr(batch, name), chosen)).float() for name in shown}
        truncated = None if batch.truncated is None else batch.truncated[torch.from_numpy(chosen)]
        estimates = sums(
            dense.pop("rewards"), dense.pop("response_mask"), config=config, truncated=truncated, **dense, **options
        )
        for out, values in zip((advantages, returns), estimates, strict=True):
            for row, line in zip(chosen.tolist(), values, strict=True):
                out[rows.of(row)] = line[len(line) - rows.lengths[row] :]
    counts = rows.spread(keep)
    counted = trained_token_mask(batch.loss_mask & counts, config)
    whitened = whiten(advantages, (batch.response_mask & counts).float(), None if counted is None else counted.float())
    return keep_masked(whitened, counts), returns
