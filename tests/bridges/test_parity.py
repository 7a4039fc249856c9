"""Every family built in Megatron: names equal the table, logits and gradients equal transformers'.

The layouts are those of ``bridges.verified``, which ``python -m bridges list`` and BRIDGES.md print.
"""

import json
import math

import pytest

from bridges.verified import LAYOUTS, degrees
from tests.bridges import parity
from tests.bridges.tiny_models import save_tiny

ELSEWHERE = {"qwen2", "qwen3", "qwen3_moe"}  # tests/runtime runs these families in its plain suite


def cases():
    for model_type, layouts in LAYOUTS.items():
        for layout in layouts:
            marks = [pytest.mark.full_matrix] if model_type in ELSEWHERE else []
            yield pytest.param(model_type, layout, marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(model_type, tp > 1) → (HF folder, transformers' logits and gradients), made once."""
    made = {}

    def get(model_type, split):
        key = (model_type, split)
        if key not in made:
            groups = {"num_key_value_heads": 2} if split and model_type != "deepseek_v3" else {}
            folder = tmp_path_factory.mktemp(model_type)
            save_tiny(model_type, folder, num_hidden_layers=4, initializer_range=0.2, **groups)
            made[key] = folder, parity.reference(folder, folder / "reference.pt")
        return made[key]

    return get


@pytest.mark.parametrize("model_type, layout", cases())
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


@pytest.mark.parametrize("model_type", [model_type for model_type, layouts in LAYOUTS.items() if layouts])
def test_names_of_the_built_model_are_the_table(ranks, models, model_type):
    from bridges.plan import Plan

    folder, _ = models(model_type, False)
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    assert ranks(1, parity.built_names, folder) == [{entry.name: entry.shape for entry in plan.entries}]
