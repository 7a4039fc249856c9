"""Divergences over a teacher's likeliest tokens, against full distributions in fp64."""

import pytest

from skyrl_megatron.errors import AlgorithmError

B, T, V, K = 3, 5, 50, 7


def distributions():
    """(student, teacher) log-probs [B, T, V] fp64 and the teacher's K likeliest ids."""
    import torch

    g = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(B, T, V, generator=g, dtype=torch.float64).mul(2).log_softmax(-1) for _ in "st")
    return student, teacher, teacher.topk(K, -1).indices


def outcomes(logprobs, ids, renormalize):
    """Probabilities of the compared outcomes, straight from the whole distribution."""
    import torch

    chosen = torch.zeros(logprobs.shape, dtype=torch.bool).scatter(-1, ids, True)
    p = logprobs.exp()
    inside = p.gather(-1, ids)
    if renormalize:
        return inside / inside.sum(-1, keepdim=True)
    return torch.cat([inside, p.masked_fill(chosen, 0).sum(-1, keepdim=True)], -1)


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_that_of_the_outcomes(beta, renormalize):
    import torch

    from skyrl_megatron.algorithms.distillation import divergence
    from skyrl_megatron.algorithms.metrics import metric_values

    student, teacher, ids = distributions()
    mask = torch.ones(B, T)
    mask[1, :2] = 0
    given = student.gather(-1, ids).requires_grad_()
    value, metrics = divergence(given, teacher.gather(-1, ids), mask, beta=beta, renormalize=renormalize)
    p, q = outcomes(teacher, ids, renormalize), outcomes(student, ids, renormalize)
    middle = beta * p + (1 - beta) * q
    wanted = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, middle) + (1 - beta) * kl(q, middle))
    torch.testing.assert_close(value, wanted * mask, rtol=1e-10, atol=1e-12)
    for name, each in (("teacher_omitted", teacher), ("student_omitted", student)):
        left = 1 - each.gather(-1, ids).exp().sum(-1)
        assert metric_values(metrics)[name] == pytest.approx(float((left * mask).sum() / mask.sum()), rel=1e-6)
    value.sum().backward()
    assert not given.grad[1, :2].any() and given.grad[0].any(-1).all()
    small = given.detach()[:, :2].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: divergence(s, teacher.gather(-1, ids)[:, :2], mask[:, :2], beta=beta, renormalize=renormalize)[0],
        small,
    )


def test_equal_distributions_have_no_divergence_and_no_gradient():
    import torch

    from skyrl_megatron.algorithms.distillation import divergence

    _, teacher, ids = distributions()
    for dtype in (torch.float64, torch.float32):
        top = teacher.to(dtype).gather(-1, ids)
        given = top.clone().requires_grad_()
        for beta in (0.0, 0.5, 1.0):
            value, _ = divergence(given, top, torch.ones(B, T), beta=beta, renormalize=False)
            value.sum().backward()
            assert value.abs().max() <= 1e-6 and given.grad.abs().max() <= 1e-5


def test_nothing_is_left_when_all_tokens_are_there():
    import torch

    from skyrl_megatron.algorithms.distillation import divergence

    student, teacher, _ = distributions()
    student, teacher = student.float().requires_grad_(), teacher.float()
    value, _ = divergence(student, teacher, torch.ones(B, T), beta=0.0, renormalize=False)
    torch.testing.assert_close(value, kl(teacher.exp(), student.exp()), rtol=1e-4, atol=1e-5)
    value.sum().backward()
    assert torch.isfinite(student.grad).all()
    with pytest.raises(AlgorithmError, match=r"must be \[B, T, K\]"):
        divergence(student, teacher[:, :, :3], torch.ones(B, T), beta=0.0, renormalize=False)


def test_rewards_are_the_log_ratio_of_the_sampled_token():
    import torch

    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns
    from skyrl_megatron.algorithms.distillation import teacher_rewards
    from skyrl_megatron.algorithms.metrics import metric_values
    from skyrl_megatron.config import AlgorithmConfig

    teacher, student = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, -3.0])
    mask = torch.tensor([True, True, False])
    gap, metrics = teacher_rewards(teacher, student, mask)
    assert gap.tolist() == [0.5, -1.0, 0.0]
    assert metric_values(metrics)["reverse_kl"] == pytest.approx(0.25)
    gap, mask = gap[None], mask[None].float()
    advantages, returns = compute_advantages_and_returns(gap, mask, ["a"], "distillation", AlgorithmConfig())
    assert advantages.tolist() == returns.tolist() == gap.tolist(), "no credit flows through time"
