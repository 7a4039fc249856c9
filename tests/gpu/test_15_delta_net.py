"""Gated delta nets by the kernels of ``fla-core`` against this package's functions in fp32."""

import pytest

pytestmark = pytest.mark.needs("fla")
PROVES = "the kernels of gated delta nets compute, forward and backward, what this package's functions do"
REPORT = "the tensor with its error, and the versions of fla-core and triton"
LENGTHS = (1000, 1, 64, 2031)


def test_kernels_are_near_fp32():
    """bf16: within 2 % of the largest entry."""
    import torch

    from skyrl_megatron.runtime.model import delta_kernels, delta_rule

    place = torch.device("cuda")
    generator = torch.Generator(place).manual_seed(0)

    def draw(*shape):
        return torch.randn(sum(LENGTHS), *shape, generator=generator, device=place)

    exact = [draw(4, 128), draw(4, 128), draw(4, 2, 128), -draw(4, 2).square(), draw(4, 2).sigmoid()]
    exact = [x.requires_grad_() for x in exact]
    q, k, *rest = exact
    plan = delta_rule.chunk_plan(LENGTHS, place)
    expected, _ = delta_rule.gated_delta_rule(delta_rule.l2_normalize(q), delta_rule.l2_normalize(k), *rest, plan)
    weights = torch.randn(expected.shape, generator=generator, device=place)
    wanted = [expected, *torch.autograd.grad((expected * weights).sum(), exact)]
    given = [x.detach().bfloat16().requires_grad_() for x in exact[:3]]
    given += [exact[3].detach().requires_grad_(), exact[4].detach().bfloat16().requires_grad_()]
    assert delta_kernels.use_kernels(torch.bfloat16, 128, on_gpu=True)
    out = delta_kernels.gated_delta_rule(*given, delta_kernels.sequence_starts(LENGTHS, place))
    found = [out, *torch.autograd.grad((out.float() * weights).sum(), given)]
    errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < 0.02, dict(zip(("out", "q", "k", "v", "g", "beta"), errors, strict=True))
