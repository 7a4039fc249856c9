"""The gated delta rule against its recurrence, token by token, in fp64; the short convolution against torch's. The
kernels of ``fla-core``: ``tests/te/test_delta_kernels.py``."""

import pytest

LENGTHS = (130, 1, 64, 7, 65)


def inputs(lengths=LENGTHS, heads=2, ratio=3, key=8, value=12, seed=0):
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def draw(*shape):
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    q, k = draw(heads, key), draw(heads, key)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -draw(heads, ratio).square()  # some heads forget within a token, others never
    return [x.requires_grad_() for x in (q, k, draw(heads, ratio, value), g, draw(heads, ratio).sigmoid())]


def recurrence(q, k, v, g, beta, lengths):
    """The rule as it is defined, one token after the other."""
    import torch

    out, start = [], 0
    for length in lengths:
        state = torch.zeros(*v.shape[1:3], q.shape[-1], v.shape[-1], dtype=v.dtype)
        for t in range(start, start + length):
            query, key = q[t][:, None, :, None], k[t][:, None, :, None]
            state = state * g[t].exp()[..., None, None]
            correction = beta[t][..., None] * (v[t] - (state * key).sum(-2))
            state = state + key * correction[..., None, :]
            out.append((state * query).sum(-2) * q.shape[-1] ** -0.5)
        start += length
    return torch.stack(out)


def test_chunks_are_the_recurrence_and_begin_anew_with_each_sequence():
    import torch

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule

    given = inputs()
    wanted = recurrence(*given, LENGTHS)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((wanted * weights).sum(), given)
    found, _ = gated_delta_rule(*given, chunk_plan(LENGTHS, torch.device("cpu")))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), given), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_fp32_is_near_fp64():
    import torch

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule

    given = [x.detach() for x in inputs()]
    plan = chunk_plan(LENGTHS, torch.device("cpu"))
    found, _ = gated_delta_rule(*(x.float() for x in given), plan)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), gated_delta_rule(*given, plan)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [(130,), (1, 130), (64, 130, 3)])
def test_a_sequence_knows_nothing_of_its_neighbours(other):
    import torch

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule

    alone = [x.detach() for x in inputs((130,))]
    expected, _ = gated_delta_rule(*alone, chunk_plan((130,), torch.device("cpu")))
    start = sum(other[: other.index(130)])
    packed = [x.detach().clone() for x in inputs(other, seed=3)]
    for mine, values in zip(packed, alone, strict=True):
        mine[start : start + 130] = values
    found, _ = gated_delta_rule(*packed, chunk_plan(other, torch.device("cpu")))
    torch.testing.assert_close(found[start : start + 130], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_short_convolution_is_torch_of_each_sequence(taps):
    import torch
    from torch.nn import functional as F

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, short_convolution

    lengths = (5, 1, 2, 9)
    x = torch.randn(sum(lengths), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(6, taps, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = [
        F.conv1d(part.T[None], weight[:, None], padding=taps - 1, groups=6)[0, :, : len(part)].T
        for part in x.split(lengths)
    ]
    found = short_convolution(x, weight, chunk_plan(lengths, torch.device("cpu")).positions)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-12, atol=1e-13)


def test_states_go_on_where_they_ended():
    """As an engine runs the rule: prompts, then the tokens after them, of sequences of unequal lengths."""
    import torch

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule

    lengths, cut = (70, 3, 129), (66, 1, 64)
    given = [x.detach() for x in inputs(lengths)]
    whole, ends = gated_delta_rule(*given, chunk_plan(lengths, torch.device("cpu")))
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    first = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, cut, strict=True)])
    second = torch.cat([torch.arange(s + n, s + m) for s, n, m in zip(starts, cut, lengths, strict=True)])
    rest = tuple(m - n for n, m in zip(cut, lengths, strict=True))
    one, states = gated_delta_rule(*(x[first] for x in given), chunk_plan(cut, torch.device("cpu")))
    other, states = gated_delta_rule(*(x[second] for x in given), chunk_plan(rest, torch.device("cpu")), states)
    torch.testing.assert_close(one, whole[first], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(other, whole[second], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(states, ends, rtol=1e-11, atol=1e-12)


def operations(lengths):
    """Operations of a forward pass of the rule on the device, without memory."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from skyrl_megatron.runtime.model.delta_rule import chunk_plan, gated_delta_rule

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            views = isinstance(result, torch.Tensor) and any(
                isinstance(each, torch.Tensor) and result._is_view() and result._base is not None for each in args
            )
            seen.append(not views)
            return result

    seen, tokens, meta = [], sum(lengths), torch.device("meta")
    shapes = [(2, 128), (2, 128), (2, 2, 128), (2, 2), (2, 2)]
    given = [torch.empty(tokens, *shape, device=meta, dtype=torch.bfloat16) for shape in shapes]
    with Count():
        gated_delta_rule(*given, chunk_plan(lengths, meta))
    return sum(seen)


def test_kernels_are_for_16_bits_on_gpus():
    """A warning names them, once, if they are missing where they would run."""
    import torch

    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.runtime.model import delta_kernels

    assert not delta_kernels.use_kernels(torch.bfloat16, 128, on_gpu=False)
    assert not delta_kernels.use_kernels(torch.float32, 128, on_gpu=True)
    assert not delta_kernels.use_kernels(torch.bfloat16, 512, on_gpu=True)
    with pytest.MonkeyPatch.context() as patch:
        delta_kernels._installed.cache_clear()
        patch.setattr(delta_kernels, "find_spec", lambda name: name)
        assert delta_kernels.use_kernels(torch.bfloat16, 128, on_gpu=True)
        delta_kernels._installed.cache_clear()
        patch.setattr(delta_kernels, "find_spec", lambda name: None)
        with pytest.warns(SkyRLMegatronWarning, match="fla-core"):
            assert not delta_kernels.use_kernels(torch.bfloat16, 128, on_gpu=True)
    delta_kernels._installed.cache_clear()
