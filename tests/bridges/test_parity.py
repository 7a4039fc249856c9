"""Every family built in Megatron: names equal the table, logits and gradients equal transformers'.

The layouts are those of ``bridges.catalog``, which ``python -m bridges list`` and docs/families.md print.
"""

import json
import math

import pytest

from bridges.verified import LAYOUTS, degrees
from tests.bridges import parity
from tests.bridges.tiny_models import LATENT_FAMILIES, save_tiny

ELSEWHERE = {"qwen2", "qwen3", "qwen3_moe"}  # tests/runtime runs these families in its plain suite
LIKE_OTHERS = {
    "minimax_m2": (),  # olmoe's norms, deepseek_v3's routing
    "dots1": (),  # qwen3_moe's attention, deepseek_v3's experts
    "glm4_moe_lite": (),  # deepseek_v3
    "hy_v3": (),  # as dots1
    "ernie4_5_moe": ("single",),
    "qwen3_next": ("single",),
    "qwen3_5_moe_text": (),  # as qwen3_next
    "mimo_v2_flash": ("single",),
    "deepseek_v32": ("single",),
    "glm_moe_dsa": (),  # as deepseek_v32
    "solar_open": (),  # glm4_moe without q/k norms
}
"""Families made of parts that others of the plain suite show → layouts that it has of them all the same."""
MORE = [
    ("qwen2_moe", "tp2·etp2"),
    ("mixtral", "tp2·cp2"),
    ("olmoe", "tp2·cp2·ep2"),
    ("deepseek_v3", "pp2"),
    ("deepseek_v3", "tp2·etp2"),
    ("deepseek_v3", "tp2·cp2·ep4"),
    ("glm4_moe", "tp2·cp2·ep2"),
    ("gpt_oss", "pp2"),
    ("gpt_oss", "tp2·cp2·ep4"),
    ("mimo_v2_flash", "tp2·cp2·ep2"),
    ("deepseek_v32", "tp2·cp2·ep4"),
    ("glm_moe_dsa", "pp2·cp2·ep2"),
]
"""Products of degrees, for what a family computes in its own way."""


def cases():
    for model_type, layouts in LAYOUTS.items():
        for layout in layouts:
            plain = model_type not in ELSEWHERE and layout in LIKE_OTHERS.get(model_type, layouts)
            marks = [] if plain else [pytest.mark.full_matrix]
            yield pytest.param(model_type, layout, marks=marks)
    for model_type, layout in MORE:
        yield pytest.param(model_type, layout, marks=pytest.mark.full_matrix)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(model_type, tp > 1) → (HF folder, transformers' logits and gradients), made once."""
    made = {}

    def get(model_type, split):
        key = (model_type, split)
        if key not in made:
            groups = {"num_key_value_heads": 2} if split and model_type not in LATENT_FAMILIES else {}
            folder = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, folder, num_hidden_layers=4, initializer_range=0.2, **groups)
            made[key] = folder, parity.reference(folder, folder / "reference.pt")
        return made[key]

    return get


@pytest.mark.parametrize("model_type, layout", list(cases()))
def test_logits_and_gradients_equal_transformers(ranks, models, model_type, layout):
    from bridges.plan import Plan

    sizes = degrees(layout)
    folder, reference = models(model_type, sizes.get("tp", 1) > 1)
    count = math.prod(sizes.get(degree, 1) for degree in ("tp", "pp", "cp", "dp"))
    if "ep" in sizes:
        count = max(count, sizes["ep"] * sizes.get("etp", 1) * sizes.get("pp", 1))
    given = {degree: size for degree, size in sizes.items() if degree != "dp"}
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    parity.check(ranks(count, parity.compare, folder, reference, given), reference, plan)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=[pytest.mark.full_matrix] if model_type in LIKE_OTHERS else [])
        for model_type in LAYOUTS
    ],
)
def test_names_of_the_built_model_are_the_table(ranks, models, model_type):
    from bridges.plan import Plan

    folder, _ = models(model_type, False)
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    assert ranks(1, parity.built_names, folder) == [{entry.name: entry.shape for entry in plan.entries}]


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "yarn": ("deepseek_v3", dict(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}), "tp2"),
    "yarn over cp": ("deepseek_v3", dict(rope_parameters=YARN, q_lora_rank=None), "cp2"),
    "queries that are not compressed": ("deepseek_v3", dict(q_lora_rank=None), "tp2"),
    "rotary rows in halves": ("deepseek_v3", dict(rope_interleave=False), "single"),
    "as Moonlight: one group": ("deepseek_v3", dict(n_group=1, topk_group=1, q_lora_rank=None), "ep2"),
    "sliding window": ("mixtral", dict(sliding_window=17), "cp2"),
    "weights of experts that add up to 1": ("olmoe", dict(norm_topk_prob=True), "tp2"),
    "llama 3 rotary": (
        "llama",
        dict(
            rope_parameters=LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, max_position_embeddings=16384
        ),
        "tp2",
    ),
    "biases in dense layers": ("llama", dict(attention_bias=True, mlp_bias=True), "tp2"),
    "some layers dense": ("qwen2_moe", dict(mlp_only_layers=[1]), "ep2"),
    "chosen keys under yarn": (
        "deepseek_v32",
        dict(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}),
        "cp2",
    ),
    "as GLM-5: one group": ("glm_moe_dsa", dict(n_group=1, topk_group=1), "ep2"),
    "as the larger ERNIE: untied": ("ernie4_5_moe", dict(tie_word_embeddings=False), "tp2"),
    "delta nets with some layers dense": ("qwen3_next", dict(mlp_only_layers=[1]), "tp2"),
    "values as they are": ("mimo_v2_flash", dict(attention_value_scale=None), "cp2"),
}


@pytest.mark.full_matrix
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_a_family(ranks, tmp_path, variant):
    from bridges.plan import Plan

    model_type, overrides, layout = VARIANTS[variant]
    groups = {} if model_type in LATENT_FAMILIES else {"num_key_value_heads": 2}
    folder = save_tiny(model_type, tmp_path, num_hidden_layers=4, initializer_range=0.2, **(groups | overrides))
    reference = parity.reference(folder, folder / "reference.pt")
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    given = {degree: size for degree, size in degrees(layout).items()}
    parity.check(ranks(1 if layout == "single" else 2, parity.compare, folder, reference, given), reference, plan)


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", *LIKE_OTHERS])
def test_padded_equals_packed(ranks, models, model_type):
    from bridges.plan import Plan

    folder, reference = models(model_type, True)
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    parity.check(ranks(2, parity.compare, folder, reference, dict(tp=2), True), reference, plan)


def test_experts_with_biases_are_not_split(ranks, models):
    from tests.support.rank_pool import RankFailure

    folder, reference = models("gpt_oss", True)
    with pytest.raises(RankFailure, match=r"expert_tensor_parallel_size=2: experts with biases cannot be split"):
        ranks(2, parity.compare, folder, reference, dict(tp=2, etp=2))


@pytest.mark.parametrize(
    "fault, model_type, layout",
    [
        ("rotary keys keep their own heads' gradient", "deepseek_v3", "tp2"),
        ("norm over the rank's own heads", "olmoe", "tp2"),
        ("sinks left out", "gpt_oss", "single"),
        ("logits taken for log-odds", "ernie4_5_moe", "single"),
        ("states run on into the next sequence", "qwen3_next", "single"),
        pytest.param("gates behind all queries", "qwen3_next", "single", marks=pytest.mark.full_matrix),
        pytest.param("gated norm keeps its own heads' gradient", "qwen3_next", "tp2", marks=pytest.mark.full_matrix),
        pytest.param("heads come back in their senders' order", "qwen3_next", "cp2", marks=pytest.mark.full_matrix),
        *(
            pytest.param(*case, marks=pytest.mark.full_matrix)
            for case in (
                ("heads come back in their senders' order", "qwen3_5_moe_text", "cp2"),
                ("gated norm keeps its own heads' gradient", "qwen3_5_moe_text", "tp2"),
                ("every key is seen", "deepseek_v32", "cp2"),
                ("every key is seen", "glm_moe_dsa", "tp2"),
                ("windows are left out", "mimo_v2_flash", "cp2"),
                ("norm over the rank's own heads", "minimax_m2", "tp2"),
                ("rotary keys keep their own heads' gradient", "glm4_moe_lite", "tp2"),
                ("experts are chosen without their bias", "dots1", "tp2"),
                ("experts are chosen without their bias", "hy_v3", "cp2"),
            )
        ),
    ],
)
def test_planted_faults_are_noticed(ranks, models, fault, model_type, layout):
    from bridges.plan import Plan

    sizes = degrees(layout)
    folder, reference = models(model_type, sizes.get("tp", 1) > 1)
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    world = sizes.get("tp", 1) * sizes.get("cp", 1)
    results = ranks(world, parity.compare_with_fault, fault, folder, reference, sizes)
    with pytest.raises(AssertionError, match="differ"):
        parity.check(results, reference, plan)
