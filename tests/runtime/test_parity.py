"""Megatron in every parallel layout equals transformers: logits and the gradient of every parameter, fp32."""

import math

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.runtime import parity

# name → degrees of ParallelConfig; the number of ranks follows.
LAYOUTS = {
    "single": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "pp2·vpp2": dict(pp=2, vpp=2),
    "cp2": dict(cp=2),
    "ep2": dict(tp=2, ep=2),
    "tp2·etp2": dict(tp=2, etp=2),
    "tp2·cp2·ep4": dict(tp=2, cp=2, ep=4),
    "pp2·cp2·ep2": dict(pp=2, cp=2, ep=2),
    "dp2·ep2": dict(ep=2),
}
MORE = {
    "dp2": dict(),
    "pp2 uneven": dict(pp=2, num_layers_in_first_pipeline_stage=1),
    "pp2·vpp2·cp2·ep2": dict(pp=2, vpp=2, cp=2, ep=2),
    "tp2·pp2": dict(tp=2, pp=2),
    "tp2·cp2·etp2·ep2": dict(tp=2, cp=2, etp=2, ep=2),
    "cp4": dict(cp=4),
    "pp4": dict(pp=4),
    "tp2·dp2·ep2": dict(tp=2, ep=2),
    "dp4·ep2": dict(ep=2),
}
RANKS = {"dp2·ep2": 2, "dp2": 2, "tp2·dp2·ep2": 4, "dp4·ep2": 4}


def ranks_of(name, layout):
    return RANKS.get(name) or math.prod(layout.get(degree, 1) for degree in ("tp", "pp", "cp"))


def groups_for(layout):
    """6 heads with 3 KV groups, or with 2 where tp must divide them."""
    return 2 if layout.get("tp", 1) > 1 else 3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(model_type, overrides) → (HF folder, file with transformers' logits and gradients), made once."""
    made = {}

    def get(model_type, **overrides):
        key = (model_type, *sorted(overrides.items()))
        if key not in made:
            # Sharp enough attention to show a mistake, while transformers' own fp32 gradients stay within
            # 5e-6 of its fp64 ones; at the default range of 0.3 they are off by up to 2e-5.
            sizes = dict(num_hidden_layers=4, initializer_range=0.2, pad_token_id=0)
            folder = save_tiny(model_type, tmp_path_factory.mktemp(model_type), **sizes, **overrides)
            made[key] = folder, parity.reference(folder, folder / "reference.pt")
        return made[key]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_qwen3_moe(ranks, models, name):
    layout = LAYOUTS[name]
    files = models("qwen3_moe", num_key_value_heads=groups_for(layout))
    parity.check(ranks(ranks_of(name, layout), parity.compare, *files, layout), files[1])


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", MORE)
def test_qwen3_moe_more_layouts(ranks, models, name):
    layout = MORE[name]
    files = models("qwen3_moe", num_key_value_heads=groups_for(layout))
    parity.check(ranks(ranks_of(name, layout), parity.compare, *files, layout), files[1])


@pytest.mark.parametrize(
    "model_type, name",
    [
        ("qwen2", "tp2"),
        ("qwen2", "pp2"),
        ("qwen3", "cp2"),
        *(
            pytest.param(model_type, name, marks=pytest.mark.full_matrix)
            for model_type in ("qwen2", "qwen3")
            for name in ("single", "tp2", "pp2", "pp2·vpp2", "cp2")
            if (model_type, name) not in {("qwen2", "tp2"), ("qwen2", "pp2"), ("qwen3", "cp2")}
        ),
    ],
)
def test_dense(ranks, models, model_type, name):
    layout = LAYOUTS[name]
    files = models(model_type, num_key_value_heads=groups_for(layout))
    parity.check(ranks(ranks_of(name, layout), parity.compare, *files, layout), files[1])


def test_padded_equals_packed(ranks, models):
    files = models("qwen3_moe", num_key_value_heads=2)
    parity.check(ranks(2, parity.compare, *files, dict(tp=2), padded=True), files[1])


@pytest.mark.parametrize(
    "build",
    [
        dict(moe_grouped_gemm=False),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ],
    ids=["sequential experts", "recomputed"],
)
def test_transformer_config_kwargs(ranks, models, build):
    files = models("qwen3_moe", num_key_value_heads=2)
    parity.check(ranks(2, parity.compare, *files, dict(tp=2, ep=2), transformer_config_kwargs=build), files[1])


@pytest.mark.parametrize(
    "fault, model_type, layout, count",
    [
        ("swapped experts", "qwen3_moe", dict(tp=2, ep=2), 2),
        ("swapped q/k norm", "qwen3_moe", {}, 1),
        ("rotated KV groups", "qwen3_moe", {}, 1),
        ("dropped bias", "qwen2", {}, 1),
        ("averaged vocabulary shard", "qwen3_moe", dict(tp=2), 2),
    ],
)
def test_planted_faults_are_noticed(ranks, models, fault, model_type, layout, count):
    files = models(model_type, num_key_value_heads=groups_for(layout))
    results = ranks(count, parity.compare, *files, layout, fault=fault)
    with pytest.raises(AssertionError, match="differ"):
        parity.check(results, files[1])
