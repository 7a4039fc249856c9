"""GAE: generalised advantage estimation (arXiv:1506.02438), the estimator that needs a critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.advantages.trained import TrainedTokens, mask_to_skip_by
from skyrl_megatron.algorithms.masked import masked_mean, masked_var
from skyrl_megatron.config.schema.algorithm import GAEConfig
from skyrl_megatron.errors import AlgorithmError

BLOCK = 32


def discounted_suffix_sum(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``y_t = Σ_{s≥t} factor^(s-t) · x_s`` for x [B, T] and 0 ≤ factor ≤ 1, as a new tensor [B, T].

    ``factor``: of all rows, or [B] float64, one for each. Within blocks of tokens by one matrix product, then the same
    over the sums of the blocks: log(T) products.
    """
    rows, length = x.shape
    size = min(BLOCK, length)
    if isinstance(factor, Tensor):
        factor = factor.view(-1, 1, 1)
    steps = torch.arange(size, device=x.device, dtype=torch.float64)
    distance = steps[:, None] - steps[None, :]  # from the column's token forward to the row's
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0).to(x.dtype)
    padding = -length % size
    padded = torch.nn.functional.pad(x, (padding, 0)) if padding else x
    blocks = padded.view(rows, -1, size)
    within = blocks @ powers if powers.dim() == 3 else (blocks.reshape(-1, size) @ powers).view(blocks.shape)
    if within.shape[1] > 1:
        whole = factor**size
        totals = discounted_suffix_sum(within[:, :, 0], whole.flatten() if isinstance(whole, Tensor) else whole)
        reach = (factor ** (size - steps)).to(x.dtype)  # from the first token of the next block
        within[:, :-1].addcmul_(totals[:, 1:, None], reach)
    return within.reshape(rows, -1)[:, padding:]


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    """Return [B] float64: λ = 1 − 1/(α·l) of a response of l tokens, at least 0 (VAPO, arXiv:2504.05118,
    length-adaptive GAE).

    The weights of the temporal-difference errors, Σ λ^t ≈ 1/(1 − λ) = α·l, then grow as the response does.
    """
    length = response_mask.sum(dim=1, dtype=torch.float64).clamp(min=1)
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
    """Estimate advantages from the critic's values and whiten them over the response; returns are A + V before that.

    δ_t = r_t + γV_{t+1} - V_t and A_t = δ_t + γλA_{t+1}, over all of T: padding stands at the left, where nothing
    flows from. ``config.gae`` may give the returns a λ of their own, and the advantages one that depends on the length
    of the response.

    With ``loss_mask`` [B, T], unless ``config.skip_untrained_tokens`` is false, t + 1 is the next trained token, and
    trained tokens alone are whitened: the critic learns no values of others. A reward at another token counts for the
    trained one before it. With ``config.gae.bootstrap_truncated`` the value at the last token of the rows that are
    ``truncated`` [B] is the value after it (bootstrap); otherwise that value is 0.

    Entries of the result outside the mask mean nothing: ignore them.
    Raises AlgorithmError without ``values`` [B, T], for a λ or γ outside [0, 1], or when fewer than two tokens are
    valid; with ``loss_mask`` such advantages are 0.
    """
    if values is None:
        raise AlgorithmError(
            "the estimator gae needs values: set trainer.critic.model.path, or take another estimator"
        )
    settings = getattr(config, "gae", None) or GAEConfig()
    critic_lambd = lambd if settings.critic_lambd is None else settings.critic_lambd
    for name, given in (("lambd", lambd), ("gae.critic_lambd", critic_lambd), ("gamma", gamma)):
        if not 0 <= given <= 1:
            raise AlgorithmError(f"trainer.algorithm.{name}={given}: must lie between 0 and 1")
    mask, trained = response_mask, None
    if (counted := mask_to_skip_by(loss_mask, config)) is not None:
        mask, trained = counted, TrainedTokens.unless_at_the_end(counted)
    if trained is not None:
        token_level_rewards, values, mask = trained.credit(token_level_rewards), trained.move(values), trained.moved
    deltas = token_level_rewards - values
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    if settings.bootstrap_truncated and truncated is not None:
        deltas[:, -1].add_(values[:, -1] * truncated, alpha=gamma)
    alpha = settings.length_adaptive_alpha
    policy_lambd = lambd if alpha is None else length_adaptive_lambda(mask, alpha)
    advantages = discounted_suffix_sum(deltas, gamma * policy_lambd)
    same = alpha is None and critic_lambd == lambd
    returns = advantages if same else discounted_suffix_sum(deltas, gamma * critic_lambd)
    returns = torch.add(returns, values, out=deltas)
    if mask is not response_mask and mask.sum() < 2:  # nothing to train on, or one token that is its own mean
        advantages.zero_()
    else:
        scale = torch.rsqrt(masked_var(advantages, mask) + 1e-8)
        advantages.sub_(masked_mean(advantages, mask)).mul_(scale)
    return (advantages, returns) if trained is None else (trained.back(advantages), trained.back(returns))
