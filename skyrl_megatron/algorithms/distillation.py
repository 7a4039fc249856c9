"""On-policy distillation: the policy learns from a teacher's distributions on its own samples (arXiv:2306.13649).

There are two signals per token: a reward, the log-ratio of the sampled token (:func:`teacher_rewards`), and a term of
the loss, a divergence over the teacher's likeliest tokens (:func:`divergence`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.errors import AlgorithmError

SMALLEST = 1e-7
"""Lower bound of the probability of all other tokens together: the rounding error of fp32 sums."""


@torch.no_grad()
def distillation(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the reward of each token [B, T] as its advantage and its return, [B, T]. Rewards are not summed over
    tokens.

    The trainer replaces the environment's rewards with ``reward_coef · (log p_teacher − log p_student)``. In
    expectation over samples this is the gradient of KL(student ‖ teacher) without the future of each token.
    """
    advantages = token_level_rewards * response_mask
    return advantages, advantages.clone()


@torch.no_grad()
def teacher_rewards(
    teacher_logprobs: Tensor, student_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, ReducibleMetrics]:
    """Return log p_teacher − log p_student of the sampled tokens, [R] in nats, 0 where masked, and metrics. The
    log-probs [R] are in nats, ``loss_mask`` [R] holds on trained tokens.

    ``reverse_kl`` is the mean of its negative: an estimate of KL(student ‖ teacher) per token from the student's
    samples. ``teacher_logprob`` is the mean log-prob of the teacher.
    """
    log_ratio = keep_masked(teacher_logprobs - student_logprobs, loss_mask)
    return log_ratio, {
        "reverse_kl": token_mean(-log_ratio, loss_mask),
        "teacher_logprob": token_mean(teacher_logprobs, loss_mask),
    }


def divergence(
    student: Tensor, teacher: Tensor, mask: Tensor, *, beta: float, renormalize: bool
) -> tuple[Tensor, ReducibleMetrics]:
    """Return the divergence between teacher and student at each token, [B, T] in nats, 0 where masked, and metrics.

    Differentiable in ``student``. ``student`` and ``teacher`` are [B, T, K]: log-probs of the teacher's K likeliest
    tokens. All other tokens together are one more outcome; with ``renormalize`` they are left out, and the K
    probabilities are scaled to a sum of 1. ``beta`` = 0 gives KL(teacher ‖ student), 1 gives KL(student ‖ teacher), a
    value in between β·KL(teacher ‖ m) + (1−β)·KL(student ‖ m) with m = β·teacher + (1−β)·student (generalised
    Jensen-Shannon, arXiv:2306.13649, equation 1). Metrics: ``teacher_omitted`` and ``student_omitted``, the
    probability outside the K tokens. Raises AlgorithmError for shapes that do not match.
    """
    if student.shape != teacher.shape or student.shape[:-1] != mask.shape:
        raise AlgorithmError(
            f"student {list(student.shape)} and teacher {list(teacher.shape)} must be [B, T, K] with the mask's "
            f"[B, T] = {list(mask.shape)}"
        )
    valid = mask > 0
    # Below fp32 the rest, 1 minus a sum near 1, would be noise: bf16 has steps of 1/256 there.
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    # Log-probs of padding may be infinite: their gradient would be NaN, although nothing uses it.
    student, teacher = (torch.where(valid[..., None], values, 0.0).to(dtype) for values in (student, teacher))
    student_rest, teacher_rest = (1 - logprobs.exp().sum(-1) for logprobs in (student, teacher))
    p, q = _outcomes(teacher, teacher_rest, renormalize), _outcomes(student, student_rest, renormalize)
    # The formula of the mixture is 0 at both ends. Divided by β or by 1 − β, its limits are the two divergences.
    if beta == 0:
        value = _kl(p, q)
    elif beta == 1:
        value = _kl(q, p)
    else:
        middle = (beta * p.exp() + (1 - beta) * q.exp()).log()
        value = beta * _kl(p, middle) + (1 - beta) * _kl(q, middle)
    metrics: ReducibleMetrics = {
        # fp32 sums of probabilities may exceed 1 by their rounding
        "teacher_omitted": token_mean(teacher_rest.detach().clamp(min=0), mask),
        "student_omitted": token_mean(student_rest.detach().clamp(min=0), mask),
    }
    return torch.where(valid, value, 0.0), metrics


def _outcomes(logprobs: Tensor, rest: Tensor, renormalize: bool) -> Tensor:
    """Return the log-probs of the compared outcomes: [B, T, K + 1], or [B, T, K] renormalized to a sum of 1.
    ``logprobs`` [B, T, K] in nats, ``rest`` [B, T] the probability of all other tokens."""
    if renormalize:
        return logprobs - logprobs.logsumexp(-1, keepdim=True)
    # Where the K tokens have all probability, the rest is 0 or, by rounding, negative, and its log −∞ or NaN.
    return torch.cat([logprobs, rest.clamp(min=SMALLEST).log()[..., None]], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of log-probs over the last dimension, [B, T] in nats."""
    return (p.exp() * (p - q)).sum(-1)
