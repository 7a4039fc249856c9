"""Adapters of other kinds than one pair of factors a map: a factor that all experts share, experts' own rank, another
scale, some projections alone, embedding and output layer. As in ``test_families.py``: transformers' logits and
gradients of the merged weights."""

from dataclasses import dataclass

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.lora import reference
from tests.lora.test_families import LAYOUTS, RANKS, check
from tests.runtime import parity

EXPERT_RANK = 2


@dataclass(frozen=True)
class Kind:
    """What differs from one pair of factors a map."""

    shared: bool = False
    """Experts have their outer factor in common."""
    normalised: bool = False
    """Experts have a rank of their own."""
    stabilised: bool = False
    """The scale is alpha / √rank."""
    separate: bool = False
    """A pair of factors for each projection."""
    names: str = "all-linear"
    exclude: str = ""
    unembed: bool = False


KINDS = {
    "shared outer factors": Kind(shared=True),
    "experts' own rank": Kind(normalised=True),
    "shared outer factors of their own rank": Kind(shared=True, normalised=True, stabilised=True),
    "embedding and output layer": Kind(names="embed_tokens,lm_head,self_attn,mlp"),
    "some projections": Kind(separate=True, exclude="k_proj,layers.0,gate_proj", unembed=True),
    "alpha over the root of the rank": Kind(stabilised=True),
}
PLAIN = [("qwen3_moe", "shared outer factors", "tp2·ep2"), ("qwen3_moe", "embedding and output layer", "tp2")]
EVERYWHERE = LAYOUTS | {"dp2·ep2": dict(ep=2), "pp2·vpp2": dict(pp=2, vpp=2)}
MATRIX = [name for name in EVERYWHERE if name != "tp2·cp2·ep4"]


def of_expert(module):
    return ".mlp.experts." in module


def scale(kind, module):
    rank = EXPERT_RANK if kind.normalised and of_expert(module) else reference.RANK
    return reference.ALPHA / (rank**0.5 if kind.stabilised else rank)


def is_shared(kind, name):
    """Whether a factor is one for all experts: before the first map, behind the second."""
    outer = name.endswith("down_proj.B") or name.endswith(("gate_proj.A", "up_proj.A"))
    return kind.shared and of_expert(name) and outer


def of_layer(name):
    """What all experts of a layer call their factor."""
    head, _, tail = name.partition(".experts.")
    return head, tail.partition(".")[2]


def start_factors(kind, plan, sizes):
    """``reference.start_factors``, changed as ``kind`` says."""
    import torch

    factors = reference.start_factors(plan, separate=kind.separate)
    first = {}
    for name, tensor in factors.items():
        if kind.normalised and of_expert(name):
            tensor = tensor[:EXPERT_RANK] if name.endswith("A") else tensor[:, :EXPERT_RANK]
        factors[name] = first.setdefault(of_layer(name), tensor) if is_shared(kind, name) else tensor
    if kind.exclude:
        left_out = tuple(kind.exclude.split(","))
        factors = {name: each for name, each in factors.items() if not any(f".{part}." in name for part in left_out)}
    ends = ("model.embed_tokens", "lm_head") if "lm_head" in kind.names else ("lm_head",) if kind.unembed else ()
    if ends:
        generator = torch.Generator().manual_seed(5)
        for module in ends:
            factors[f"{module}.A"] = torch.randn(reference.RANK, sizes[1], generator=generator) * 0.1
            factors[f"{module}.B"] = torch.randn(sizes[0], reference.RANK, generator=generator) * 0.1
    return factors


def case(family, kind, folder):
    """Base folder, factors, file with transformers' logits and gradients of the weights with the factors in them."""
    import shutil

    from safetensors.torch import load_file, save_file

    from skyrl_megatron.runtime.model.description import read_hf_model

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


def body(base, factors, expected, layout, kind, planted_fault=False):
    """(largest error of the logits or None, factor → error of its gradient over the largest entry). Planted fault: a
    factor that all experts share is reduced as an expert's own, and not over ep."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron_lora.attach import attach
    from skyrl_megatron_lora.folder import fill_factors, stream_factors
    from skyrl_megatron_lora.layers import AdapterSettings
    from skyrl_megatron_lora.targets import select

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model = build_model(base, groups, dtype=torch.float32)
    load_hf(model, base, groups)
    settings = AdapterSettings(reference.RANK, reference.ALPHA, 0.0, "kaiming", rank_stabilised=kind.stabilised)
    selection = select(model.hf.plan, kind.names, kind.exclude, unembed=kind.unembed, separate=kind.separate)
    rank = EXPERT_RANK if kind.normalised else None
    how = dict(separate=kind.separate, shared_outer=kind.shared, expert_rank=rank)
    adapters = attach(model, groups, selection, settings, **how)
    fill_factors(adapters, groups, reference.finder(factors))
    for factor in adapters.factors() if planted_fault else ():
        factor.tensor.allreduce &= ".experts." not in factor.name
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
    return name if name.endswith("B") or kind.separate else joined(name)


def joined(name):
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in parts:
            name = name.replace(part, parts[0])
    return name


@pytest.mark.parametrize("family, name, layout", PLAIN)
def test_every_kind(ranks, cases, family, name, layout):
    base, factors, expected = cases(family, KINDS[name])
    check(ranks(RANKS.get(layout, 2), body, base, factors, expected, EVERYWHERE[layout], KINDS[name]), factors)


@pytest.mark.full_matrix
def test_shared_factors_that_are_not_summed_over_ep_show(ranks, cases):
    kind = KINDS["shared outer factors"]
    base, factors, expected = cases("qwen3_moe", kind)
    results = ranks(2, body, base, factors, expected, EVERYWHERE["dp2·ep2"], kind, True)
    with pytest.raises(AssertionError, match=r"the gradient of .*mlp\.experts"):
        check(results, factors)


def bodies_of(made, layout):
    from megatron.core import parallel_state

    results = []
    for kind, each in made:
        results.append(body(*each, layout, kind))
        parallel_state.destroy_model_parallel()
    return results


@pytest.mark.full_matrix
@pytest.mark.parametrize("layout", MATRIX)
def test_every_kind_in_every_layout(ranks, cases, layout):
    made = [(kind, cases("qwen3_moe", kind)) for kind in KINDS.values()]
    results = ranks(RANKS.get(layout, 2), bodies_of, made, EVERYWHERE[layout], timeout_s=600)
    for name, (_, (_, factors, _)), of_ranks in zip(KINDS, made, zip(*results, strict=True), strict=True):
        print(name, end=": ")
        check(of_ranks, factors)


def test_experts_that_differ_where_they_share_are_refused(ranks, cases):
    import torch

    kind = KINDS["shared outer factors"]
    base, factors, expected = cases("qwen3_moe", kind)
    name = "model.layers.2.mlp.experts.3.down_proj.B"
    other = factors | {name: torch.ones_like(factors[name])}
    with pytest.raises(AssertionError, match=r"experts\.3\.down_proj has another lora_B than expert 0"):
        ranks(1, body, base, other, expected, {}, kind)
