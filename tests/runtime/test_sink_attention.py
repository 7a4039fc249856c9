"""Attention with sinks by the flash kernel, against the path that has all scores. The kernel needs a GPU: a dense one
in fp64 stands in for it, forward and backward, by the formulas of its paper (arXiv:2307.08691)."""

import itertools
from types import SimpleNamespace

import pytest

LENGTHS = (5, 1, 9)
HEADS, GROUPS, WIDTH = 4, 2, 8


def scores_of(query, key, pack, begin, end):
    """Masked scores of a sequence, [heads, q, k]."""
    import torch

    q, k = query[begin:end].transpose(0, 1), key[begin:end].transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
    position = torch.arange(end - begin)
    distance = position[:, None] - position[None, :]
    seen = (distance >= 0) & (distance < (pack.window or end))
    return (q @ k.mT * pack.scale).masked_fill(~seen, -torch.inf)


def dense_forward(query, key, value, pack):
    import torch

    results, sums = [], []
    for begin, end in itertools.pairwise(pack.starts.tolist()):
        scores = scores_of(query, key, pack, begin, end)
        values = value[begin:end].transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
        results.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(results), torch.cat(sums, 1)


def dense_backward(gradient, query, key, value, out, logsumexp, pack):
    """What the kernel does with the output and the log-sum-exp that it is given."""
    import torch

    found = [torch.zeros_like(x) for x in (query, key, value)]
    for begin, end in itertools.pairwise(pack.starts.tolist()):
        here, repeats = slice(begin, end), HEADS // GROUPS
        q, k, v = (x[here].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        d_out = gradient[here].transpose(0, 1)
        p = (scores_of(query, key, pack, begin, end) - logsumexp[:, here, None]).exp()
        inner = (gradient[here] * out[here]).sum(-1).mT.unsqueeze(-1)
        d_scores = p * (d_out @ v.mT - inner) * pack.scale
        whole = (d_scores @ k, d_scores.mT @ q, p.mT @ d_out)
        for target, part in zip(found, whole, strict=True):
            part = part if target is found[0] else part.unflatten(0, (GROUPS, repeats)).sum(1)
            target[here] = part.transpose(0, 1)
    return tuple(found)


def attention(window):
    import torch
    from megatron.core.transformer import TransformerConfig

    from skyrl_megatron.runtime.model.attention import PackedAttention

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        softmax_type="learnable",
        window_size=None if window is None else (window - 1, 0),
    )
    module = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=one, tp=one))
    module.softmax_offset = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64))
    return module


def compare(window):
    """Output and gradients of both paths."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return torch.randn(sum(LENGTHS), heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    inputs, module = [draw(HEADS), draw(GROUPS), draw(GROUPS)], attention(window)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    params = SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=max(LENGTHS))
    params.padded_lengths = LENGTHS
    weights = torch.randn(sum(LENGTHS), HEADS * WIDTH, generator=generator, dtype=torch.float64)
    results = []
    for attend in (lambda: module(*inputs, packed_seq_params=params), lambda: module._varlen(*inputs, params)):
        out = attend()
        results.append([out, *torch.autograd.grad((out * weights).sum(), [*inputs, module.softmax_offset])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # weights of the other path are fp32


@pytest.fixture
def dense(monkeypatch):
    from skyrl_megatron.runtime.model import sink_attention

    monkeypatch.setattr(sink_attention, "flash_forward", dense_forward)
    monkeypatch.setattr(sink_attention, "flash_backward", dense_backward)
    return sink_attention


@pytest.mark.parametrize("window", [None, 3])
def test_output_and_gradients_are_those_of_all_scores(dense, window):
    compare(window)


def test_a_backward_pass_without_the_sinks_shows(dense, monkeypatch):
    import torch

    def without(gradient, query, key, value, out, logsumexp, pack):
        return dense_backward(gradient, query, key, value, *dense_forward(query, key, value, pack), pack)

    monkeypatch.setattr(dense, "flash_backward", without)
    with pytest.raises(AssertionError, match="not close"):
        compare(None)
    assert torch.is_grad_enabled()


def largest(attend):
    """Elements of the largest tensor that is made forward and backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, torch.Tensor):
                    seen.append(each.numel())
            return result

    seen = []
    with Sizes():
        attend().sum().backward()
    return max(seen)


def test_no_scores_and_no_repeated_keys():
    """64 heads of gpt-oss on a sequence of 1,024 tokens: all scores are 16 times as large as the queries. By torch's
    own description of its kernels, without memory, which is also a check of their arguments."""
    import torch

    from skyrl_megatron.runtime.model.sink_attention import Pack, SinkAttention

    tokens, meta = 1024, dict(device="meta", dtype=torch.bfloat16)
    query, key, value = (torch.empty(tokens, heads, 64, **meta).requires_grad_() for heads in (64, 8, 8))
    sinks = torch.empty(64, **meta).requires_grad_()
    for window in (None, 128):
        starts = torch.empty(2, device="meta", dtype=torch.int32)
        pack = Pack(starts, tokens, 0.125, window)
        assert largest(lambda pack=pack: SinkAttention.apply(query, key, value, sinks, pack)) == query.numel()
    for each in (query, key, value, sinks):
        assert each.grad.shape == each.shape
    module = attention(None)
    module.softmax_offset = torch.nn.Parameter(torch.empty(64, **meta))
    padded = [x.detach()[:, None].permute(1, 2, 0, 3).requires_grad_() for x in (query, key, value)]
    assert largest(lambda: module._attend(*padded, None)) > 16 * query.numel()
