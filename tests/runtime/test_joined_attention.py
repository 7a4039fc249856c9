"""Attention joined from pieces of the flash kernel (sinks, windows, shared prefixes, context parallelism), against one
softmax over all scores. The kernel needs a GPU: a dense one in fp64 stands in for it, forward and backward, by the
formulas of its paper (arXiv:2307.08691)."""

import itertools
from types import SimpleNamespace

import pytest

HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6
ROWS = (5, 1, 9), None
TREE = (12, 8, 4, 12, 4, 4), ((-1, 11), (0, 8), (1, 3), (1, 9), (0, 2), (-1, 4))
"""A segment that others follow at two depths, with and without padding, and one that none does."""


def scores_of(query, key, piece, scale, number):
    """Masked scores of a sequence, [heads, q, k]: the last query is aligned with the last key."""
    import torch

    (begin, end), (first, last) = (starts[number : number + 2].tolist() for starts in piece.sizes[:2])
    assert end - begin <= piece.sizes[2] and last - first <= piece.sizes[3]
    q, k = query[begin:end].transpose(0, 1), key[first:last].transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
    distance = torch.arange(end - begin)[:, None] + (last - first) - (end - begin) - torch.arange(last - first)
    seen = distance >= 0 if piece.causal else torch.ones_like(distance, dtype=torch.bool)
    if piece.window is not None:
        seen &= distance < piece.window
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf), slice(begin, end), slice(first, last)


def dense_attend(piece, query, key, value, scale):
    import torch

    out, sums = torch.empty_like(query), query.new_empty(query.shape[:2])
    for number in range(len(piece.sizes[0]) - 1):
        scores, of_queries, of_keys = scores_of(query, key, piece, scale, number)
        values = value[of_keys].transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
        out[of_queries] = (scores.softmax(-1) @ values).transpose(0, 1)
        sums[of_queries] = scores.logsumexp(-1).mT
    return out, sums


def dense_gradients(piece, gradient, query, key, value, out, total, scale):
    """What the kernel does with the output and the log-sum-exp that it is given."""
    import torch

    found = [torch.zeros_like(x) for x in (query, key, value)]
    for number in range(len(piece.sizes[0]) - 1):
        scores, of_queries, of_keys = scores_of(query, key, piece, scale, number)
        repeats = HEADS // GROUPS
        k, v = (x[of_keys].transpose(0, 1).repeat_interleave(repeats, 0) for x in (key, value))
        q, d_out = (x[of_queries].transpose(0, 1) for x in (query, gradient))
        p = (scores - total[of_queries].mT[..., None]).exp()
        inner = (gradient[of_queries] * out[of_queries]).sum(-1).mT.unsqueeze(-1)
        d_scores = p * (d_out @ v.mT - inner) * scale
        found[0][of_queries] = (d_scores @ k).transpose(0, 1)
        for target, part in zip(found[1:], (d_scores.mT @ q, p.mT @ d_out), strict=True):
            target[of_keys] = part.unflatten(0, (GROUPS, repeats)).sum(1).transpose(0, 1)
    return tuple(found)


def attention(window=None, sinks=False):
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
        softmax_type="learnable" if sinks else "vanilla",
        window_size=None if window is None else (window - 1, 0),
    )
    module = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=one, tp=one))
    if sinks:
        module.softmax_offset = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64))
    return module


def visible(lengths, segments, window):
    """Which token of a pack sees which, [P, P] bool, from the definition: those before it in its row."""
    import torch

    places = []  # (segment, position in its rows, whether it is padding)
    begins = {-1: (0, 0)}
    for number, length in enumerate(lengths):
        parent, tokens = (-1, length) if segments is None else segments[number]
        begin = sum(begins[parent])
        begins[number] = begin, tokens
        places += [(number, begin + place, place >= tokens) for place in range(length)]

    def path(number):
        return () if number < 0 else (number, *path(-1 if segments is None else segments[number][0]))

    seen = torch.zeros(len(places), len(places), dtype=torch.bool)
    for (i, (segment, place, _)), (j, (other, before, padding)) in itertools.product(enumerate(places), repeat=2):
        of_row = other == segment or (other in path(segment) and not padding)
        seen[i, j] = of_row and 0 <= place - before < (window or place + 1)
    return seen


def all_scores(module, query, key, value, seen):
    import torch

    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, k).mul(module.scale).masked_fill(~seen, -torch.inf)
    if module.softmax_offset is not None:
        scores = torch.cat([scores, module.softmax_offset[:, None, None].expand(HEADS, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def compare(pack, window=None, sinks=False, cp=1):
    """Output and gradients by pieces, of the ranks of ``cp``, and by all scores."""
    import torch

    from skyrl_megatron.runtime.model.attention import flash_pieces, local_positions

    (lengths, segments), module = pack, attention(window, sinks)
    generator, total = torch.Generator().manual_seed(0), sum(lengths)

    def draw(heads, width):
        return torch.randn(total, heads, width, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(HEADS, WIDTH), draw(GROUPS, WIDTH), draw(GROUPS, VALUES)]
    trained = [*inputs, *([module.softmax_offset] if sinks else [])]
    weights = torch.randn(total, HEADS * VALUES, generator=generator, dtype=torch.float64)
    expected = all_scores(module, *inputs, visible(lengths, segments, window))
    found = torch.zeros_like(expected)
    for rank in range(cp):
        here = local_positions(lengths, cp, rank)
        pieces = flash_pieces(lengths, cp, rank, window, torch.device("cpu"), segments)
        joined = module._join(inputs[0].index_select(0, here), *inputs[1:], pieces)
        found = found.index_copy(0, here, joined)
    for name, *both in zip(
        ("out", "query", "key", "value", "sinks"),
        *([out, *torch.autograd.grad((out * weights).sum(), trained)] for out in (found, expected)),
        strict=False,
    ):
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def dense(monkeypatch):
    from skyrl_megatron.runtime.model.joined_attention import FlashPiece

    monkeypatch.setattr(FlashPiece, "attend", dense_attend)
    monkeypatch.setattr(FlashPiece, "gradients", dense_gradients)
    return FlashPiece


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("pack", [ROWS, TREE], ids=["rows", "tree"])
def test_output_and_gradients_are_those_of_all_scores(dense, pack, window, sinks):
    compare(pack, window, sinks)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("pack", [((8, 4, 12), None), TREE], ids=["rows", "tree"])
def test_tokens_of_each_rank_see_all_keys_before_them(dense, pack, window):
    compare(pack, window, cp=2)


def test_a_kernel_for_each_depth_and_no_copy_for_each_segment(dense):
    """Also where many answers follow one prompt: keys of a segment are taken once."""
    import torch

    from skyrl_megatron.runtime.model.attention import flash_pieces

    segments = ((-1, 100), *[(0, 10)] * 8, (-1, 50), *[(9, 10)] * 8)
    lengths = tuple(tokens for _, tokens in segments)
    whole, below = flash_pieces(lengths, 1, 0, None, torch.device("cpu"), segments)
    assert whole.keys == slice(None) and whole.queries == slice(None)
    assert below.keys.tolist() == [*range(100), *range(180, 230)] and len(below.queries) == 160
    assert [starts.tolist() for starts in below.sizes[:2]] == [[0, 80, 160], [0, 100, 150]]


FAULTS = {
    "sinks": lambda piece, gradient, *inputs: dense_gradients(
        piece, gradient, *inputs[:3], *dense_attend(piece, *inputs[:3], inputs[-1]), inputs[-1]
    ),
    "siblings": lambda piece, gradient, query, key, value, out, total, scale: dense_gradients(
        piece, gradient, query, key, value, out, total + (not piece.causal), scale
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backward_pass_without_the_other_pieces_shows(dense, monkeypatch, fault):
    monkeypatch.setattr(dense, "gradients", FAULTS[fault])
    with pytest.raises(AssertionError, match="not close"):
        compare(ROWS if fault == "sinks" else TREE, sinks=fault == "sinks")


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
    """64 heads of gpt-oss on sequences of 1,024 tokens: all scores are 16 times as large as the queries. By torch's
    own description of its kernels, without memory, which is also a check of their arguments."""
    import torch

    from skyrl_megatron.runtime.model.attention import flash_pieces
    from skyrl_megatron.runtime.model.joined_attention import JoinedAttention

    meta = dict(device="meta", dtype=torch.bfloat16)
    sinks = torch.empty(64, **meta).requires_grad_()
    for window, segments in ((None, None), (128, None), (None, ((-1, 512), (0, 256), (0, 256)))):
        lengths = (1024,) if segments is None else tuple(tokens for _, tokens in segments)
        pieces = flash_pieces(lengths, 1, 0, window, torch.device("meta"), segments)
        given = [torch.empty(1024, heads, 64, **meta).requires_grad_() for heads in (64, 8, 8)]
        assert largest(lambda x=given, p=pieces: JoinedAttention.apply(*x, sinks, p, 0.125)) == given[0].numel()
        assert all(each.grad.shape == each.shape for each in (*given, sinks))
    module = attention(sinks=True)
    module.softmax_offset = torch.nn.Parameter(torch.empty(64, **meta))
    padded = [x.detach()[:, None].permute(1, 2, 0, 3).requires_grad_() for x in given]
    assert largest(lambda: module._attend(*padded, None)) > 16 * given[0].numel()
