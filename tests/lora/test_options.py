"""How factors start, and an adapter of the output layer in the fused head."""

import pytest


# ------------------------------------------------------------------ how they start
def torch_factor(init, shape):
    """A as PEFT (kaiming, normal, which it calls gaussian) or torch make it."""
    import torch
    from peft.tuners.lora import Linear

    rank, width = shape
    if init == "xavier":
        return torch.nn.init.xavier_normal_(torch.empty(shape))
    from peft import LoraConfig

    base = torch.nn.Linear(width, 8, bias=False)
    kind = {"kaiming": True, "normal": "gaussian"}[init]
    layer = Linear(base, "default", LoraConfig(r=rank, init_lora_weights=kind), r=rank, init_lora_weights=kind)
    return layer.lora_A["default"].weight.detach()


@pytest.mark.parametrize("init", ["kaiming", "normal", "xavier"])
def test_first_factors_are_drawn_as_by_peft_and_torch(init):
    """Kolmogorov-Smirnov: two samples of 262,144 draws differ by less than 0.006 (p = 0.0002) in distribution."""
    import torch

    from skyrl_megatron_lora.layers import AdapterSettings, first_factor, second_factor

    torch.manual_seed(0)
    shape = (64, 4096)
    settings = AdapterSettings(shape[0], 16, 0.0, init, seed=3)
    ours, theirs = (
        each.flatten().sort().values for each in (first_factor("x", shape, settings), torch_factor(init, shape))
    )
    both = torch.cat([ours, theirs])
    steps = [torch.searchsorted(each, both, right=True).double() / len(each) for each in (ours, theirs)]
    assert (steps[0] - steps[1]).abs().max() < 0.006
    assert not second_factor("x", (8, 64), settings).any()
    other = first_factor("y", shape, settings).flatten()
    assert abs(torch.corrcoef(torch.stack([other, first_factor("x", shape, settings).flatten()]))[0, 1]) < 0.01


def test_zero_starts_the_second_factor_instead():
    from skyrl_megatron_lora.layers import AdapterSettings, first_factor, second_factor

    settings = AdapterSettings(4, 16, 0.0, "zero")
    assert not first_factor("x", (4, 9), settings).any() and second_factor("x", (9, 4), settings).all()


# ------------------------------------------------------------------ the fused head
@pytest.mark.parametrize("frozen", [False, True])
def test_the_fused_head_has_its_adapter(frozen):
    """Log-probs, entropies and gradients of hidden states, head and factors are those of autograd on all logits."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.logprobs import SoftmaxSettings, fused_logprobs_and_entropy

    class Alone(dist.ProcessGroup):
        def __init__(self):
            super().__init__(0, 1)

    tokens, hidden, vocab, rank, temperature = 37, 16, 53, 4, 0.7
    torch.manual_seed(0)
    given = [
        torch.randn(*shape) for shape in ((tokens, hidden), (vocab + 3, hidden), (tokens, rank), (vocab + 3, rank))
    ]
    targets = torch.randint(0, vocab, (tokens,))
    results = []
    for fused in (True, False):
        x, weight, h, b = (tensor.clone().requires_grad_() for tensor in given)
        weight.requires_grad_(not frozen)
        if fused:
            settings = SoftmaxSettings(vocab, temperature, chunk_size=10, with_entropy=True)
            logprobs, entropy = fused_logprobs_and_entropy(x, weight, targets, Alone(), settings, (h, b))
        else:
            every = torch.log_softmax((x @ weight.t() + h @ b.t())[:, :vocab] / temperature, -1)
            logprobs, entropy = every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)
        (1.3 * logprobs.sum() + (entropy * torch.arange(tokens)).sum() / 10).backward()
        results.append([logprobs.detach(), entropy.detach(), *(each.grad for each in (x, weight, h, b))])
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()
