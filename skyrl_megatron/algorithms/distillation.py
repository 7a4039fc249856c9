"""Learning from a teacher's distributions on the policy's own samples (on-policy distillation, arXiv:2306.13649).

Per token either of two signals: the log-ratio of the sampled token, a reward (:func:`teacher_rewards`), or a
divergence over the teacher's likeliest tokens, a term of the loss (:func:`divergence`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skyrl_megatron.algorithms.masked import check_token_tensors, keep_masked
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, token_mean
from skyrl_megatron.errors import AlgorithmError

SMALLEST = 1e-7
"""Probability below which the bucket of all other tokens counts as empty: what fp32 sums leave."""


@torch.no_grad()
def distillation(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Give each token its own reward as advantage and return, [B, T]: what a teacher says of a token is of that token.

    The trainer puts ``reward_coef · (log p_teacher − log p_student)`` in the place of the environment's rewards. Its
    expectation over samples is the gradient of KL(student ‖ teacher) with each token's future left out.
    """
    advantages = token_level_rewards * response_mask
    return advantages, advantages.clone()


@torch.no_grad()
def teacher_rewards(
    teacher_logprobs: Tensor, student_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, ReducibleMetrics]:
    """Return log p_teacher − log p_student of the sampled tokens, nats, [B, T], 0 where masked; and ``reverse_kl``,
    the mean of its negative: an estimate of KL(student ‖ teacher) per token from the student's samples."""
    check_token_tensors(
        "teacher_logprobs", teacher_logprobs=teacher_logprobs, student_logprobs=student_logprobs, loss_mask=loss_mask
    )
    gap = keep_masked(teacher_logprobs - student_logprobs, loss_mask)
    return gap, {"reverse_kl": token_mean(-gap, loss_mask), "teacher_logprob": token_mean(teacher_logprobs, loss_mask)}


def divergence(
    student: Tensor, teacher: Tensor, mask: Tensor, *, beta: float, renormalize: bool
) -> tuple[Tensor, ReducibleMetrics]:
    """Return the divergence of each token's distributions, nats, [B, T], differentiable in ``student``, 0 where
    masked.

    ``student``, ``teacher``: [B, T, K] log-probs of the teacher's K likeliest tokens. All other tokens are one more
    outcome, or, with ``renormalize``, left out and the rest scaled up. ``beta``: 0 is KL(teacher ‖ student), 1 is
    KL(student ‖ teacher), between them β·KL(teacher ‖ m) + (1−β)·KL(student ‖ m) with m = β·teacher + (1−β)·student
    (generalised Jensen-Shannon, arXiv:2306.13649, equation 1). Metrics: ``teacher_omitted`` and ``student_omitted``,
    the probability beyond the K tokens.
    """
    if student.shape != teacher.shape or student.shape[:-1] != mask.shape:
        raise AlgorithmError(
            f"student {list(student.shape)} and teacher {list(teacher.shape)} must be [B, T, K] with the mask's "
            f"[B, T] = {list(mask.shape)}"
        )
    valid = mask > 0
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    student, teacher = (torch.where(valid[..., None], each, 0.0).to(dtype) for each in (student, teacher))
    rest = [1 - each.exp().sum(-1) for each in (student, teacher)]
    p, q = (_outcomes(each, left, renormalize) for each, left in zip((teacher, student), rest[::-1], strict=True))
    if beta == 0:
        value = _kl(p, q)
    elif beta == 1:
        value = _kl(q, p)
    else:
        middle = (beta * p.exp() + (1 - beta) * q.exp()).log()
        value = beta * _kl(p, middle) + (1 - beta) * _kl(q, middle)
    metrics: ReducibleMetrics = {
        "teacher_omitted": token_mean(rest[1].detach().clamp(min=0), mask),
        "student_omitted": token_mean(rest[0].detach().clamp(min=0), mask),
    }
    return torch.where(valid, value, 0.0), metrics


def _outcomes(logprobs: Tensor, rest: Tensor, renormalize: bool) -> Tensor:
    """Return log-probs of the outcomes that are compared: [B, T, K + 1], or [B, T, K] scaled to a sum of 1."""
    if renormalize:
        return logprobs - logprobs.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=SMALLEST).log()[..., None]], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
