"""Shared prefixes on a GPU: the pieces of the flash kernel and a training pass, against rows that each run alone."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.training import bodies
from tests.training.test_shared_prefixes import SHARED, branching_batch, sharing

PROVES = "tokens that several rows begin with are computed once, and log-probs and gradients are those of rows"
REPORT = "the tensor, or the parameters, named with their errors; torch's version"
SIZES = dict(num_hidden_layers=4, hidden_size=64, moe_intermediate_size=32)
FAMILIES = {
    "qwen3_moe": dict(**SIZES, num_key_value_heads=2, head_dim=64),
    "deepseek_v3": dict(SIZES, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32,
                        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
}  # fmt: skip
TREE = ((-1, 517), (0, 64), (1, 130), (1, 33), (0, 201), (-1, 90), (5, 8), (5, 300))
"""Segments that follow at two depths, as (the one before, tokens); each is padded to a multiple of 8."""


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("window", [None, 128])
def test_pieces_are_near_all_scores(window):
    """bf16: within 2 % of the largest entry of fp32's softmax over all scores."""
    import torch

    from skyrl_megatron.runtime.model.attention import flash_pieces
    from skyrl_megatron.runtime.model.joined_attention import JoinedAttention
    from tests.runtime.test_joined_attention import visible

    lengths = tuple(-(-tokens // 8) * 8 for _, tokens in TREE)
    heads, groups, total, place = 16, 2, sum(lengths), torch.device("cuda")
    generator = torch.Generator(place).manual_seed(0)

    def draw(count):
        return torch.randn(total, count, 64, generator=generator, device=place).bfloat16().requires_grad_()

    given = [draw(heads), draw(groups), draw(groups)]
    weights = torch.randn(total, heads, 64, generator=generator, device=place)
    query, key, value = exact = [x.detach().float().requires_grad_() for x in given]
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    hidden = ~visible(lengths, TREE, window).to(place)
    scores = torch.einsum("qhd,khd->hqk", query, k).mul(0.125).masked_fill(hidden, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    wanted = [expected, *torch.autograd.grad((expected * weights).sum(), exact)]
    out = JoinedAttention.apply(*given, None, flash_pieces(lengths, 1, 0, window, place, TREE), 0.125)
    joined = [out, *torch.autograd.grad((out.float() * weights).sum(), given)]
    errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(joined, wanted, strict=True)]
    assert max(errors) < 0.02, dict(zip(("out", "query", "key", "value"), errors, strict=True))


def shared_backward(folder, batch, layers, overrides):
    with sharing():
        return bodies.one_backward(folder, batch, layers, SHARED | overrides)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["local", pytest.param("transformer_engine", marks=pytest.mark.needs("te", "gpu"))])
def test_a_pass_is_that_of_rows(ranks, tmp_path, family, layers):
    """In fp32 with our layers (also without a GPU), and in bf16 as near to it as separate rows are."""
    folder = save_tiny(family, tmp_path / "hf", initializer_range=0.1, **FAMILIES[family])
    batch = branching_batch(1003)
    exact = ranks(1, bodies.one_backward, folder, batch, "local", {"trainer.bf16": False})[0]
    rows = ranks(1, bodies.one_backward, folder, batch, layers, {"trainer.bf16": True})[0]
    shared = ranks(1, shared_backward, folder, batch, layers, {"trainer.bf16": True})[0]
    bodies.check_as_near(shared, rows, exact)
    if layers == "local":
        shared = ranks(1, shared_backward, folder, batch, layers, {"trainer.bf16": False})[0]
        bodies.check_as_near(shared, exact, exact)
