"""Experts with adapters on CPU, against every token computed by itself in fp64."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm
TOKENS, EXPERTS, CHOICES, HIDDEN, INNER, RANK, SLOTS = 37, 6, 2, 24, 16, 3, 2


def build(seed=0, expert_map=None):
    """(experts, their weights and inputs); slot 1 is empty, and some tokens have no adapter."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

    from skyrl_megatron_lora.vllm_experts import AdaptedExperts

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = SimpleNamespace(
        x=draw(TOKENS, HIDDEN),
        w1=draw(EXPERTS, 2 * INNER, HIDDEN),
        w2=draw(EXPERTS, HIDDEN, INNER),
        ids=torch.randint(EXPERTS, (TOKENS, CHOICES), generator=generator),
        weights=draw(TOKENS, CHOICES).abs(),
        slots=torch.randint(-1, SLOTS, (TOKENS,), generator=generator),
        a13=tuple(draw(SLOTS, EXPERTS, RANK, HIDDEN) for _ in range(2)),
        b13=tuple(draw(SLOTS, EXPERTS, INNER, RANK) for _ in range(2)),
        a2=(draw(SLOTS, EXPERTS, RANK, INNER),),
        b2=(draw(SLOTS, EXPERTS, HIDDEN, RANK),),
    )
    experts = AdaptedExperts.__new__(AdaptedExperts)  # what it is made of is vLLM's whole configuration
    experts._lora_context = MoELoRAContext(
        tensors.a13,
        tensors.b13,
        tensors.a2,
        tensors.b2,
        adapter_enabled=torch.tensor([1, 0, 0]),
        max_loras=SLOTS,
        top_k=CHOICES,
        w13_num_slices=2,
        fully_sharded=False,
        tp_rank=0,
        tp_size=1,
        local_num_experts=EXPERTS,
        punica_wrapper=SimpleNamespace(token_lora_indices=tensors.slots),
        use_tuned_config=False,
    )
    return experts, tensors


def apply(experts, t, expert_map=None, weigh_inputs=False, ids=None):
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    out = torch.empty_like(t.x)
    ids = t.ids if ids is None else ids
    arguments = (out, t.x, t.w1, t.w2, t.weights, ids, MoEActivation.SILU, EXPERTS, expert_map)
    experts.apply(*arguments, a1q_scale=None, apply_router_weight_on_input=weigh_inputs)
    return out


def expected(t, here=range(EXPERTS), weigh=True):
    import torch
    from torch.nn import functional as F

    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        slot = int(t.slots[token])
        for choice in range(CHOICES):
            expert = int(t.ids[token, choice])
            if expert not in here:
                continue
            gate, up, down = *t.w1[expert].double().chunk(2), t.w2[expert].double()
            if slot == 0:
                gate = gate + t.b13[0][0, expert].double() @ t.a13[0][0, expert].double()
                up = up + t.b13[1][0, expert].double() @ t.a13[1][0, expert].double()
                down = down + t.b2[0][0, expert].double() @ t.a2[0][0, expert].double()
            x = t.x[token].double()
            y = down @ (F.silu(gate @ x) * (up @ x))
            out[token] += y * (t.weights[token, choice].double() if weigh else 1)
    return out


def test_every_token_has_the_adapter_of_its_request():
    experts, t = build()
    assert {-1, 0, 1} == set(t.slots.tolist())
    out = apply(experts, t)
    assert (out - expected(t)).abs().max() < 1e-6
    t.slots.fill_(-1)
    assert (out - expected(t)).abs().max() > 0.1


def test_experts_of_other_ranks_are_left_out():
    import torch

    experts, t = build(1)
    here = torch.full((EXPERTS,), -1, dtype=torch.int32)
    here[2:5] = torch.arange(2, 5, dtype=torch.int32)  # local numbers are the global ones of this test's weights
    assert (apply(experts, t, expert_map=here) - expected(t, range(2, 5))).abs().max() < 1e-6


def test_weights_of_the_router_may_be_in_the_inputs():
    experts, t = build(2)
    assert (apply(experts, t, weigh_inputs=True) - expected(t, weigh=False)).abs().max() < 1e-6
