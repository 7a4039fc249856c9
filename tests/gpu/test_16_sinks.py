"""Flash attention with sinks (gpt-oss) against the path that has all scores, in fp32."""

import pytest

pytestmark = pytest.mark.needs("gpu")
PROVES = "attention with sinks by the flash kernel computes, forward and backward, what all scores do"
REPORT = "the tensor with its error; torch's version"
LENGTHS = (700, 1, 64, 283)


@pytest.mark.parametrize("window", [None, 128])
def test_kernel_is_near_all_scores(window):
    """bf16: within 2 % of the largest entry."""
    import itertools

    import torch

    from skyrl_megatron.runtime.model.attention import flash_pieces
    from skyrl_megatron.runtime.model.joined_attention import JoinedAttention

    heads, groups, place = 16, 2, torch.device("cuda")
    generator = torch.Generator(place).manual_seed(0)

    def draw(count):
        return torch.randn(sum(LENGTHS), count, 64, generator=generator, device=place).bfloat16()

    given = [draw(heads), draw(groups), draw(groups), torch.linspace(-2, 3, heads, device=place).bfloat16()]
    given = [x.requires_grad_() for x in given]
    exact = [x.detach().float().requires_grad_() for x in given]
    weights = torch.randn(sum(LENGTHS), heads, 64, generator=generator, device=place)
    bounds = [0, *itertools.accumulate(LENGTHS)]
    query, key, value, sinks = exact
    parts = []
    for begin, end in itertools.pairwise(bounds):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
        distance = torch.arange(end - begin, device=place)
        distance = distance[:, None] - distance[None, :]
        seen = (distance >= 0) & (distance < (window or end))
        scores = (q @ k.mT * 0.125).masked_fill(~seen, -torch.inf)
        all_scores = torch.cat([scores, sinks[:, None, None].expand(heads, end - begin, 1)], -1)
        parts.append((all_scores.softmax(-1)[..., :-1] @ v).transpose(0, 1))
    expected = torch.cat(parts)
    wanted = [expected, *torch.autograd.grad((expected * weights).sum(), exact)]
    out = JoinedAttention.apply(*given, flash_pieces(LENGTHS, 1, 0, window, place), 0.125)
    found = [out, *torch.autograd.grad((out.float() * weights).sum(), given)]
    errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < 0.02, dict(zip(("out", "query", "key", "value", "sinks"), errors, strict=True))
