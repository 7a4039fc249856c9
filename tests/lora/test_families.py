"""Adapters of every family: logits are those of transformers with the adapter in its weights, and the factors'
gradients follow from the gradients of those weights: of W + s·B·A they are s·∂W·Aᵀ and s·Bᵀ·∂W."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.lora import reference
from tests.runtime import parity

SCALE = reference.ALPHA / reference.RANK
TOLERANCE = 2 * parity.GRADIENT_TOLERANCE
"""A factor's gradient is what a product with random factors leaves of ∂W: rounding weighs more in it than in ∂W."""
PLAIN = [("deepseek_v3", "tp2·ep2")]
LAYOUTS = {
    "single": {},
    "tp2": dict(tp=2),
    "tp2·ep2": dict(tp=2, ep=2),
    "tp2·etp2": dict(tp=2, etp=2),
    "pp2": dict(pp=2),
    "cp2": dict(cp=2),
    "tp2·cp2·ep4": dict(tp=2, cp=2, ep=4),
}
RANKS = {"single": 1, "tp2·cp2·ep4": 4}
MORE = [
    ("qwen2_moe", "tp2·etp2"),
    ("qwen2", "pp2"),
    ("llama", "tp2"),
    ("qwen3", "single"),
    ("qwen3_moe", "tp2·cp2·ep4"),
    ("mixtral", "tp2·ep2"),
    ("olmoe", "tp2·ep2"),
    ("glm4_moe", "tp2·ep2"),
    ("deepseek_v3", "cp2"),
    ("qwen3_next", "tp2·ep2"),
    ("qwen3_next", "cp2"),
    ("qwen3_5_moe_text", "single"),
    ("qwen3_5_moe_text", "tp2·cp2·ep4"),
]
OWN_SIZES = {name: dict(num_hidden_layers=2, seed=3) for name in ("qwen3_next", "qwen3_5_moe_text")}
"""A delta net and attention. Of four layers, transformers' own fp32 logits are 3e-4 from its fp64 ones; of two, and
this seed, 8e-5, and its gradients 1e-5."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(family, canonical) → base folder, factors, reference of the merged model; made once each."""
    made = {}

    def get(family, separate):
        if (family, separate) not in made:
            made[family, separate] = case(family, separate, tmp_path_factory.mktemp(family))
        return made[family, separate]

    return get


def case(family, separate, folder):
    from safetensors.torch import save_file

    from bridges.peft import CONFIG, PREFIX, WEIGHTS, adapter_config, merge_adapter
    from skyrl_megatron.runtime.model.description import read_hf_model

    groups = {} if family == "deepseek_v3" else dict(num_key_value_heads=2)
    sizes = dict(num_hidden_layers=4, initializer_range=0.2, **groups) | OWN_SIZES.get(family, {})
    base = save_tiny(family, folder / "base", **sizes)
    factors = reference.start_factors(read_hf_model(base).plan, separate=separate)
    adapter = folder / "adapter"
    adapter.mkdir()
    named = {f"{PREFIX}{name[:-2]}.lora_{name[-1]}.weight": tensor.clone() for name, tensor in factors.items()}
    save_file(named, adapter / WEIGHTS)
    shape = dict(rank=reference.RANK, scale=reference.ALPHA / reference.RANK)
    (adapter / CONFIG).write_bytes(adapter_config(**shape, modules=[], base=None))
    merge_adapter(base, adapter, folder / "merged")
    # The chain rule multiplies an error of ∂W by what the factors leave of ∂W itself, so that it is taken in fp64.
    return base, factors, parity.reference(folder / "merged", folder / "reference.pt", dtype="float64")


def body(base, factors, expected, layout, separate, build, fused=None):
    """(largest error of the logits or None, factor → error of its gradient over the largest entry). ``fused``: norms
    stand inside the next map, as in Transformer Engine's layers; "planted fault": adapters do not know of them."""
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
    from tests.lora.fused_norms import forget_norms, fuse_norms

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model = build_model(base, groups, dtype=torch.float32, **build)
    load_hf(model, base, groups)
    if fused:
        fuse_norms(model)
    settings = AdapterSettings(reference.RANK, reference.ALPHA, 0.0, "kaiming")
    selection = select(model.hf.plan, "all-linear", separate=separate)
    adapters = attach(model, groups, selection, settings, separate=separate)
    fill_factors(adapters, groups, reference.finder(factors))
    if fused == "planted fault":
        forget_norms(model)
    reference_of = torch.load(expected)
    logits = parity.forward_backward(model, groups, reference_of["logits"].float(), False, None)
    adapters.sum_over_etp()
    wanted = gradients(factors, reference_of["gradients"], model.hf.plan, separate)
    errors = {}
    for factor in stream_factors(adapters, groups, of=lambda parameter: parameter.main_grad):
        name = f"{factor.module}.{factor.letter}"
        errors[name] = float((factor.tensor - wanted[name]).abs().max() / wanted[name].abs().max())
    return logits, errors


def gradients(factors, of_weights, plan, separate):
    """Factor → its gradient, by the chain rule; one A of several projections gets the sum."""
    from skyrl_megatron_lora.targets import targets

    found = {}
    for target in targets(plan):
        if f"{target.hf_modules[0]}.A" not in factors:
            continue
        of_a = []
        for module in target.hf_modules:
            weight = of_weights[f"{module}.weight"]
            a, b = (factors[f"{module}.{letter}"].double() for letter in "AB")
            found[f"{module}.B"] = SCALE * weight @ a.T
            of_a.append(SCALE * b.T @ weight)
        for number, module in enumerate(target.hf_modules):
            found[f"{module}.A"] = of_a[number] if separate else sum(of_a)
    return found


def check(results, factors):
    logits = [logits for logits, _ in results if logits is not None]
    errors = {name: error for _, each in results for name, error in each.items()}
    worst = max(errors, key=errors.get)
    print(f"largest error: logits {max(logits):.1e}, gradients {errors[worst]:.1e} ({worst})")
    assert max(logits) <= parity.LOGITS_TOLERANCE
    assert set(errors) == set(factors), "some factors were not looked at"
    assert errors[worst] <= TOLERANCE, f"the gradient of {worst} is off by {errors[worst]:.1e}"


@pytest.mark.parametrize(
    "family, layout", [*PLAIN, *(pytest.param(*each, marks=pytest.mark.full_matrix) for each in MORE)]
)
def test_every_family(ranks, cases, family, layout):
    base, factors, expected = cases(family, False)
    results = ranks(RANKS.get(layout, 2), body, base, factors, expected, LAYOUTS[layout], False, {})
    check(results, factors)


@pytest.mark.parametrize(
    "family, layout",
    [
        pytest.param("qwen3_moe", "tp2·ep2", marks=pytest.mark.full_matrix),
        pytest.param("qwen3_moe", "tp2·etp2", marks=pytest.mark.full_matrix),
        pytest.param("qwen3_moe", "pp2", marks=pytest.mark.full_matrix),
        pytest.param("glm4_moe", "tp2·cp2·ep4", marks=pytest.mark.full_matrix),
        pytest.param("deepseek_v3", "single", marks=pytest.mark.full_matrix),
    ],
)
def test_a_pair_of_factors_for_each_projection(ranks, cases, family, layout):
    base, factors, expected = cases(family, True)
    results = ranks(RANKS.get(layout, 2), body, base, factors, expected, LAYOUTS[layout], True, {})
    check(results, factors)


@pytest.mark.full_matrix
@pytest.mark.parametrize("layout", ["tp2·ep2", "tp2·etp2"])
def test_experts_one_by_one(ranks, cases, layout):
    """Megatron's SequentialMLP: a module for each expert."""
    base, factors, expected = cases("qwen3_moe", False)
    build = {"transformer_config_kwargs": {"moe_grouped_gemm": False}}
    check(ranks(2, body, base, factors, expected, LAYOUTS[layout], False, build), factors)


FUSED = [("deepseek_v3", "tp2·ep2")]
MORE_FUSED = [("qwen3", "single"), ("qwen2", "pp2"), ("llama", "tp2"), ("qwen3_moe", "tp2·etp2"), ("glm4_moe", "cp2")]


@pytest.mark.parametrize(
    "family, layout", [*FUSED, *(pytest.param(*each, marks=pytest.mark.full_matrix) for each in MORE_FUSED)]
)
def test_maps_that_normalise_their_input_themselves(ranks, cases, family, layout):
    """Transformer Engine's ``LayerNormLinear`` gets what is not normalised yet, and so does a hook on it. It runs on
    GPUs alone: ``fused_norms.py`` has its interface, ``tests/te`` compares that with the real one."""
    base, factors, expected = cases(family, False)
    check(ranks(RANKS.get(layout, 2), body, base, factors, expected, LAYOUTS[layout], False, {}, "fused"), factors)


def test_an_adapter_that_sees_what_is_not_normalised_shows(ranks, cases):
    base, factors, expected = cases("deepseek_v3", False)
    layout = LAYOUTS["tp2·ep2"]
    with pytest.raises(AssertionError):
        check(ranks(2, body, base, factors, expected, layout, False, {}, "planted fault"), factors)
