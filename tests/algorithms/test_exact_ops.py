"""Operations with the same bits in every batch: random batches, cuts and orders, and what a planted fault shows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def draw(seed, *shape):
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 31, 128, 1000])
def test_a_row_does_not_depend_on_the_others(width):
    import torch

    from skyrl_megatron.algorithms import exact_ops

    x, weight, w = draw(0, 203, width), draw(1, 77, width), draw(2, width)
    functions = {
        "product": lambda rows: exact_ops.product(rows, weight),
        "norm": lambda rows: exact_ops.rms_norm(rows, w, 1e-6),
        "silu": exact_ops.silu,
        "log_softmax": exact_ops.log_softmax,
        "fixed_sum": exact_ops.fixed_sum,
    }
    random = torch.Generator().manual_seed(3)
    for name, function in functions.items():
        whole = function(x)
        for _ in range(40):
            rows = torch.randint(len(x), (int(torch.randint(1, 70, (1,), generator=random)),), generator=random)
            assert torch.equal(function(x[rows]), whole[rows]), name
    half = torch.cat([exact_ops.product(x, part.clone()) for part in weight.split([40, 37])], 1)
    assert torch.equal(half, exact_ops.product(x, weight))


def test_values_are_those_of_torch():
    import torch
    from torch.nn import functional as F

    from skyrl_megatron.algorithms import exact_ops

    x, w = draw(0, 90, 130), draw(1, 130)
    pairs = [
        (exact_ops.rms_norm(x, w, 1e-6), F.rms_norm(x, (130,), w, 1e-6)),
        (exact_ops.silu(x * 40), F.silu(x * 40)),
        (exact_ops.sigmoid(x), x.sigmoid()),
        (exact_ops.log_softmax(x.masked_fill(x < -1, -torch.inf)), x.masked_fill(x < -1, -torch.inf).log_softmax(-1)),
        (exact_ops.linear(x, w[None], w[:1]), F.linear(x, w[None], w[:1])),
        *((function(x), x.sum(-1)) for function in (exact_ops.fixed_sum, exact_ops.serial_sum)),
        (exact_ops.growing_sum(x), x.sum(0)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-6)
    zeros = torch.cat([x, torch.zeros(37, 130)])
    assert torch.equal(exact_ops.growing_sum(zeros), exact_ops.growing_sum(x))


@pytest.mark.parametrize("limit", [1 << 22, 1 << 12])
def test_attention_of_whole_sequences_chunks_and_single_tokens(monkeypatch, limit):
    """Alone, packed with others, in chunks after cached keys, and token by token; also in small pieces of memory."""
    import torch

    from skyrl_megatron.algorithms import exact_ops

    monkeypatch.setattr(exact_ops, "SCORES", limit)
    lengths = [5, 33, 64, 100, 17, 1, 40]
    total = sum(lengths)
    q, k, v = draw(0, total, 4, 24), draw(1, total, 2, 24), draw(2, total, 2, 24)
    whole = exact_ops.attention(q, k, v, lengths, lengths, 0.2)
    ordinary = exact_ops.ordinary_attention(lengths, 0.2)(q, k, v)
    torch.testing.assert_close(whole, ordinary, atol=3e-6, rtol=0)
    start = 0
    for length in lengths:
        for size in (length, 7, 1):
            for first in range(0, length, size):
                end = min(first + size, length)
                part = slice(start + first, start + end)
                seen = slice(start, start + end)
                found = exact_ops.attention(q[part], k[seen], v[seen], [end - first], [end], 0.2)
                assert torch.equal(found, whole[part]), (length, size, first)
        start += length


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 45), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_attention_of_any_chunks_in_any_batches(sequences, random):
    """Each sequence in its chunks, in batches with chunks of others, in any order."""
    import torch

    from skyrl_megatron.algorithms import exact_ops

    lengths = [sum(chunks) for chunks in sequences]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    q, k, v = draw(0, sum(lengths), 4, 24), draw(1, sum(lengths), 2, 24), draw(2, sum(lengths), 2, 24)
    whole = exact_ops.attention(q, k, v, lengths, lengths, 0.2)
    done, waiting = [0] * len(sequences), {i: [*chunks] for i, chunks in enumerate(sequences)}
    while waiting:
        batch = random.sample(sorted(waiting), random.randint(1, len(waiting)))
        parts, seen = [], []
        for i in batch:
            first, done[i] = starts[i] + done[i], done[i] + waiting[i].pop(0)
            parts.append(torch.arange(first, starts[i] + done[i]))
            seen.append(torch.arange(starts[i], starts[i] + done[i]))
        rows, keys = torch.cat(parts), torch.cat(seen)
        found = exact_ops.attention(q[rows], k[keys], v[keys], [*map(len, parts)], [*map(len, seen)], 0.2)
        assert torch.equal(found, whole[rows])
        waiting = {i: left for i, left in waiting.items() if left}


def test_gradients_are_the_ordinary_ones():
    import torch
    from torch.nn import functional as F

    from skyrl_megatron.algorithms import exact_ops

    x = draw(0, 20, 16).requires_grad_()
    exact_ops.with_gradient(exact_ops.silu, F.silu, x).square().sum().backward()
    (ordinary,) = torch.autograd.grad(F.silu(x).square().sum(), x)
    torch.testing.assert_close(x.grad, ordinary, atol=1e-6, rtol=1e-6)
    extreme = torch.tensor([-200.0, 200.0], requires_grad=True)
    exact_ops.with_gradient(exact_ops.silu, F.silu, extreme).sum().backward()
    assert extreme.grad.tolist() == [0.0, 1.0]


def test_rotation_is_undone_by_its_inverse():
    import torch

    from skyrl_megatron.algorithms import exact_ops

    x, angles = draw(0, 9, 3, 20), draw(1, 9, 1, 8)
    for interleaved in (False, True):
        turned = exact_ops.rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
        assert torch.equal(turned[..., 16:], x[..., 16:]) and not torch.equal(turned, x)
        back = exact_ops.rotate(turned, angles.cos(), -angles.sin(), interleaved=interleaved)
        torch.testing.assert_close(back, x, atol=1e-6, rtol=0)


def test_a_machine_whose_products_depend_on_the_batch_is_refused(monkeypatch):
    """A fake product, because no BLAS here has this fault: it adds the two halves of a row if there are few rows."""
    from skyrl_megatron.algorithms import exact_ops
    from skyrl_megatron.errors import ConfigError

    exact_ops.check()
    product = exact_ops.product

    def depends(x, weight):
        if len(x) > 40:
            return product(x, weight)
        return sum(
            product(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
        )

    monkeypatch.setattr(exact_ops, "product", depends)
    with pytest.raises(ConfigError, match=r"trainer.exact_rollouts=True.*depend on the batch"):
        exact_ops.check()


@pytest.mark.parametrize("softmax", [True, False])
def test_equal_scores_go_to_the_lower_index(softmax):
    """In the trainer's routing too, whose values and gradients are Megatron's."""
    import torch

    from skyrl_megatron.algorithms import exact_ops

    logits = draw(0, 50, 16).round()
    scores = exact_ops.expert_scores(logits, softmax=softmax)
    torch.testing.assert_close(scores, logits.softmax(-1) if softmax else logits.sigmoid())
    for row, experts in zip(scores.tolist(), exact_ops.best_experts(scores, 4).tolist(), strict=True):
        assert experts == sorted(range(16), key=lambda e: (-row[e], e))[:4]
    weights, experts = exact_ops.expert_weights(scores, torch.tensor([[9, 2]] * 50), normalise=True, scale=2.5)
    assert experts.tolist() == [[2, 9]] * 50
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_pre_softmax": True, "scaling_factor": 2.5},
        {"score_function": "sigmoid", "scaling_factor": 2.5},
        {"score_function": "sigmoid", "bias": True},
    ],
)
def test_routing_is_megatrons(options):
    import torch

    from skyrl_megatron.runtime.model import moe

    bias = {"expert_bias": draw(1, 16) / 4} if options.get("bias") else {}
    chosen = {name: value for name, value in options.items() if name != "bias"} | bias
    found = []
    for route in (moe.exact_routing, moe._choose_experts):
        logits = draw(0, 50, 16).requires_grad_()
        weights, routes = route(logits, 4, **chosen)
        weights.square().sum().backward()
        found.append((weights.detach(), routes, logits.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert torch.equal(found[0][1].sum(1), torch.full((50,), 4))
