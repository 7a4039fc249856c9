"""Adapters of other kinds than one pair of factors a map: a factor that all experts share, experts' own rank,
embedding and output layer. As in ``test_families.py``: transformers' logits and gradients of the merged weights."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.lora import reference
from tests.lora.test_families import LAYOUTS, RANKS, check
from tests.runtime import parity

EXPERT_RANK = 2
SHARED, NORMALISED, ENDS = "shared outer factors", "experts' own rank", "embedding and output layer"
EVERYTHING = "embed_tokens,lm_head,self_attn,mlp"
PLAIN = [("qwen3_moe", SHARED, "tp2·ep2"), ("qwen3_moe", ENDS, "tp2")]


def of_expert(module):
    return ".mlp.experts." in module


def scale(kind, module):
    rank = EXPERT_RANK if NORMALISED in kind and of_expert(module) else reference.RANK
    return reference.ALPHA / rank


def is_shared(kind, name):
    """Whether a factor is one for all experts: before the first map, behind the second."""
    outer = name.endswith("down_proj.B") or name.endswith(("gate_proj.A", "up_proj.A"))
    return SHARED in kind and of_expert(name) and outer


def of_layer(name):
    """What all experts of a layer call their factor."""
    head, _, tail = name.partition(".experts.")
    return head, tail.partition(".")[2]


def start_factors(kind, plan, sizes):
    """``reference.start_factors``, changed as ``kind`` says."""
    import torch

    factors = reference.start_factors(plan, separate=False)
    first = {}
    for name, tensor in factors.items():
        if NORMALISED in kind and of_expert(name):
            tensor = tensor[:EXPERT_RANK] if name.endswith("A") else tensor[:, :EXPERT_RANK]
        factors[name] = first.setdefault(of_layer(name), tensor) if is_shared(kind, name) else tensor
    if kind == ENDS:
        generator = torch.Generator().manual_seed(5)
        for module in ("model.embed_tokens", "lm_head"):
            factors[f"{module}.A"] = torch.randn(reference.RANK, sizes[1], generator=generator) * 0.1
            factors[f"{module}.B"] = torch.randn(sizes[0], reference.RANK, generator=generator) * 0.1
    return factors


def case(family, kind, folder):
    """Base folder, factors, file with transformers' logits and gradients of the weights with the factors in them."""
    import shutil

    from safetensors.torch import load_file, save_file

    from skyrl_megatron.runtime.hf.model import read_hf_model

    groups = {} if family == "deepseek_v3" else dict(num_key_value_heads=2)
    base = save_tiny(family, folder / "base", num_hidden_layers=4, initializer_range=0.2, **groups)
    weights = load_file(base / "model.safetensors")
    factors = start_factors(kind, read_hf_model(base).plan, weights["lm_head.weight"].shape)
    for name in weights:
        module = name.removesuffix(".weight")
        if f"{module}.A" in factors:
            a, b = (factors[f"{module}.{letter}"].double() for letter in "AB")
            weights[name] = (weights[name].double() + scale(kind, module) * b @ a).float()
    shutil.copytree(base, folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    return base, factors, parity.reference(folder / "merged", folder / "reference.pt", dtype="float64")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def get(family, kind):
        if (family, kind) not in made:
            made[family, kind] = case(family, kind, tmp_path_factory.mktemp("variant"))
        return made[family, kind]

    return get


def body(base, factors, expected, layout, kind):
    """(largest error of the logits or None, factor → error of its gradient over the largest entry)."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.rules.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf.load import load_hf
    from skyrl_megatron.runtime.lora.adapter import AdapterSettings
    from skyrl_megatron.runtime.lora.attach import attach
    from skyrl_megatron.runtime.lora.names import by_module, fill_factors, stream_factors
    from skyrl_megatron.runtime.lora.targets import select
    from skyrl_megatron.runtime.model.build import build_model

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model = build_model(base, groups, dtype=torch.float32)
    load_hf(model, base, groups)
    settings = AdapterSettings(reference.RANK, reference.ALPHA, 0.0, "kaiming")
    selection = select(model.hf.plan, EVERYTHING if kind == ENDS else "all-linear")
    rank = EXPERT_RANK if NORMALISED in kind else None
    adapters = attach(model, groups, selection, settings, shared_outer=SHARED in kind, expert_rank=rank)
    fill_factors(adapters, groups, by_module(factors))
    reference_of = torch.load(expected)
    logits = parity.forward_backward(model, groups, reference_of["logits"].float(), False, None)
    adapters.sum_over_etp()
    wanted = gradients(factors, reference_of["gradients"], kind)
    errors = {}
    for factor in stream_factors(adapters, groups, of=lambda parameter: parameter.main_grad):
        name = f"{factor.module}.{factor.letter}"
        errors[name] = float((factor.tensor - wanted[name]).abs().max() / wanted[name].abs().max())
    return logits, errors


def gradients(factors, of_weights, kind):
    """Factor → its gradient, by the chain rule; one that several projections or experts have gets the sum."""
    found = {}
    for module in {name[:-2] for name in factors}:
        weight = of_weights[f"{module}.weight"]
        a, b = (factors[f"{module}.{letter}"].double() for letter in "AB")
        found[f"{module}.A"] = scale(kind, module) * b.T @ weight
        found[f"{module}.B"] = scale(kind, module) * weight @ a.T
    total = {}
    for name in found:
        group = common(kind, name)
        total[group] = total.get(group, 0) + found[name]
    return {name: total[common(kind, name)] for name in found}


def common(kind, name):
    """Equal for the names of one tensor of Megatron's."""
    if is_shared(kind, name):
        name = ".".join(of_layer(name))
    return name if name.endswith("B") else joined(name)


def joined(name):
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in parts:
            name = name.replace(part, parts[0])
    return name


@pytest.mark.parametrize("family, kind, layout", PLAIN)
def test_every_kind(ranks, cases, family, kind, layout):
    base, factors, expected = cases(family, kind)
    check(ranks(RANKS.get(layout, 2), body, base, factors, expected, LAYOUTS[layout], kind), factors)


def test_experts_that_differ_where_they_share_are_refused(ranks, cases):
    import torch

    base, factors, expected = cases("qwen3_moe", SHARED)
    name = "model.layers.2.mlp.experts.3.down_proj.B"
    other = factors | {name: torch.ones_like(factors[name])}
    with pytest.raises(AssertionError, match=r"experts\.3\.down_proj has another lora_B than expert 0"):
        ranks(1, body, base, other, expected, {}, SHARED)
