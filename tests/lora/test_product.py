"""An adapter's product that is added in place: value, gradients and memory against autograd's own, in fp64."""

import pytest

EXPERTS = {"one matrix": None, "experts": [3, 0, 4]}


def sides(counts):
    """(base, x, weight, counts as a tensor) with 7 rows, and the plain product of x and weight."""
    import torch

    g = torch.Generator().manual_seed(0)
    shape = (5, 2) if counts is None else (len(counts), 5, 2)
    weight = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    x = torch.randn(7, 1, 2, generator=g, dtype=torch.float64).squeeze(1) if counts else None
    x = torch.randn(7, 1, 2, generator=g, dtype=torch.float64) if x is None else x
    x.requires_grad_()
    inner = torch.randn(*x.shape[:-1], 5, generator=g, dtype=torch.float64, requires_grad=True)
    matrices = [weight] if counts is None else weight
    rows = x.reshape(7, 2).split(counts or [7])
    product = torch.cat([part @ matrix.t() for part, matrix in zip(rows, matrices, strict=True)]).view(inner.shape)
    return inner, x, weight, None if counts is None else torch.tensor(counts), product


@pytest.mark.parametrize("counts", EXPERTS.values(), ids=EXPERTS)
def test_value_and_gradients_are_autograds(counts):
    import torch

    from skyrl_megatron_lora.layers import add_factor_product

    inner, x, weight, tensor, product = sides(counts)
    inputs = (inner, x, weight)
    factor = torch.randn(inner.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = inner * 2 + 0.3 * product
    base = inner * 2
    got = add_factor_product(base, x, weight, tensor, 0.3)
    assert torch.allclose(got, want, rtol=0, atol=1e-14)
    assert got.data_ptr() == base.data_ptr(), "no second output"
    expected = torch.autograd.grad((want * factor).sum(), inputs)
    for mine, theirs in zip(torch.autograd.grad((got * factor).sum(), inputs), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks_that_no_kernel_takes_get_zeros_beside_them(rank):
    """Rows of 16 bytes, four fp32 values, for what a GPU has one kernel for; the result is that of the rank itself."""
    from unittest import mock

    import torch

    from skyrl_megatron_lora import layers as products

    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([3, 0, 4])
    x, a, b = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((7, 8), (3, rank, 8), (3, 8, rank))
    )
    factor = torch.randn(7, 8, generator=generator)
    experts = zip(x.double().split(counts.tolist()), a.double(), b.double(), strict=True)
    want = torch.cat([rows @ down.t() @ up.t() for rows, down, up in experts])
    with mock.patch.object(products, "grouped_gemm", wraps=products.grouped_gemm) as gemm:
        got = products._grouped(products._grouped(x, a, counts), b, counts)
    seen = [size for call in gemm.call_args_list for size in (call.args[0].shape[-1], *call.args[1].shape[1:])]
    assert len(seen) == 6 and all(size % 4 == 0 for size in seen)
    assert (got - want).abs().max() < 1e-5
    expected = torch.autograd.grad((want * factor).sum(), (x, a, b))
    for mine, theirs in zip(torch.autograd.grad((got * factor).sum(), (x, a, b)), expected, strict=True):
        assert mine.shape == theirs.shape and (mine - theirs).abs().max() < 1e-5


def test_a_base_that_something_else_needs_is_an_error():

    from skyrl_megatron_lora.layers import add_factor_product

    inner, x, weight, _, _ = sides(None)
    base = inner.exp()  # whose backward pass reads its result
    added = add_factor_product(base, x, weight, None, 0.3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        added.sum().backward()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_map_keeps_no_input(frozen):
    """Neither one matrix nor those of experts; what a gradient of the weight needs is kept."""
    import torch

    from skyrl_megatron.runtime.cpu_patches import grouped_gemm, linear

    x = torch.randn(6, 1, 4, requires_grad=True)
    kept = []
    maps = {
        "one": lambda w: linear(x * 1, w[0], None, False, False, False),
        "experts": lambda w: grouped_gemm((x * 1).view(6, 4), w, torch.tensor([2, 4])),
    }
    for of in maps.values():
        weight = torch.randn(2, 5, 4, requires_grad=not frozen)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = of(weight)
        assert any(t.shape[-1] == 4 and t.numel() == x.numel() for t in kept) != frozen
        out.sum().backward()
        assert torch.isfinite(x.grad).all() and (weight.grad is None) == frozen
