"""Adapters trained on real Megatron equal PEFT's on transformers, and a pair of factors for each projection autograd's
on merged weights, in every layout."""

import pytest

from tests.lora import bodies, reference
from tests.training.bodies import NO_DISTRIBUTED
from tests.training.conftest import batch, folder  # noqa: F401  (the model and batch of the training step)

LAYOUTS = {
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2·dp2·ep2": dict(world=4, tp=2, ep=2),
}
MORE = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "dp2·ep2": dict(world=2, ep=2),
    "pp2": dict(world=2, pp=2),
    "cp2": dict(world=2, cp=2),
    "tp2·dp2·etp2": dict(world=4, tp=2, etp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "pp2·dp2·ep2": dict(world=4, pp=2, ep=2),
}


@pytest.fixture(scope="module")
def plan(folder):  # noqa: F811
    from skyrl_megatron.runtime.model.description import read_hf_model

    return read_hf_model(folder).plan


@pytest.fixture(scope="module")
def expected(folder, batch, plan):  # noqa: F811
    return reference.steps(folder, batch, reference.start_factors(plan, separate=False), tied=True)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_every_layout(ranks, folder, batch, expected, name):  # noqa: F811
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, NO_DISTRIBUTED)
    bodies.check(outcomes, expected)


@pytest.fixture(scope="module")
def expected_apart(folder, batch, plan):  # noqa: F811
    return reference.merged_steps(folder, batch, reference.start_factors(plan, separate=True))


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", LAYOUTS | MORE)
def test_a_pair_of_factors_for_each_projection(ranks, folder, batch, expected_apart, name):  # noqa: F811
    layout, keys = (LAYOUTS | MORE)[name], NO_DISTRIBUTED | {f"{bodies.HOW}lora_type": "canonical_lora"}
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected_apart, layout, keys)
    bodies.check(outcomes, expected_apart)


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "fault, name",
    [
        ("expert factors not summed over etp", "tp2·etp2"),
        ("whole factors not summed over tp", "tp2"),
        ("scale of a rank's share", "tp2"),
        ("gate and up swapped", "single"),
        ("expert factors not summed over edp", "tp2·dp2·ep2"),
        ("ep offset missing", "tp2·dp2·ep2"),
    ],
)
def test_planted_faults_are_seen(ranks, folder, batch, expected, fault, name):  # noqa: F811
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, NO_DISTRIBUTED, fault)
    with pytest.raises(AssertionError):
        bodies.check(outcomes, expected)
