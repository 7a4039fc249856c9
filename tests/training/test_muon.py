"""Muon in every layout against float64 on whole tensors; its checkpoints, settings and mistakes."""

import json

import pytest

from tests.training import bodies, muon_reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

OPTIMIZER = "trainer.policy.optimizer_config."
KWARGS = f"{MEGATRON}optimizer_config_kwargs."
TOLERANCE = 1e-5  # of the L2 norm of each tensor's update
LAYOUTS = {
    "single": dict(world=1),
    "dp2": dict(world=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "dp2·ep2": dict(world=2, ep=2),
}
MORE = {
    "tp2": dict(world=2, tp=2),
    "dp4": dict(world=4),
    "tp2·pp2": dict(world=4, tp=2, pp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "tp2·etp2·dp2": dict(world=4, tp=2, etp=2),
    "tp4": dict(world=4, tp=4),
}
KEYS = {
    f"{OPTIMIZER}optimizer": "muon",
    f"{OPTIMIZER}lr": muon_reference.LR,
    f"{OPTIMIZER}adam_lr": muon_reference.ADAM_LR,
    f"{OPTIMIZER}weight_decay": muon_reference.DECAY,
    f"{OPTIMIZER}max_grad_norm": 0.0,
    f"{OPTIMIZER}adam_betas": list(muon_reference.BETAS),
    f"{KWARGS}adam_eps": muon_reference.ADAM_EPS,
    f"{KWARGS}muon_momentum": muon_reference.MOMENTUM,
}


def set_gradients(engine, step):
    """Give every parameter its share of the whole gradients of :mod:`muon_reference`, as after their reduction."""
    import torch

    from bridges.rules import shard
    from skyrl_megatron.runtime.model.local_weights import local_weights

    def gradient(parameter):
        return parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)

    for weight in local_weights(engine.model, engine.groups, of=gradient):
        entry = weight.entry
        if entry.is_buffer:
            continue
        pieces = [
            muon_reference.gradient(each.name, each.index, each.shape if each.index is None else each.shape[1:], step)
            for each in entry.hf
        ]
        over = engine.groups.etp if entry.is_expert else engine.groups.tp
        padded = weight.tensor.shape[0] * over.size() if entry.split.vocab else None
        weight.tensor.copy_(shard(entry.to_megatron(pieces), entry, over.size(), over.rank(), padded))


def take_steps(engine, steps):
    from skyrl_megatron.runtime.optimizer import step_if_finite

    for step in steps:
        set_gradients(engine, step)
        result = step_if_finite(engine.optimizer, engine.lr_schedule, engine.chunks)
        assert not result.skipped
        engine.optimizer.zero_grad()


def weights_of(engine):
    """(HF name, expert) → whole weight, on the ranks that gather it."""
    from skyrl_megatron.runtime.hf_weights import stream_hf

    return {(each.name, each.index): each.tensor.clone() for each in stream_hf(engine.model, engine.groups)}


def engine_of(folder, layout, overrides):
    from skyrl_megatron.runtime.engine import MegatronEngine

    return MegatronEngine(bodies.config(folder, **layout, overrides=KEYS | overrides))


def muon_body(folder, layout, overrides):
    """(HF name, expert) → relative error of its update after two steps."""
    engine = engine_of(folder, layout, overrides)
    before = weights_of(engine)
    take_steps(engine, range(muon_reference.STEPS))
    hf = json.loads((folder / "config.json").read_text())
    errors = {}
    for key, after in weights_of(engine).items():
        if key[0].endswith("e_score_correction_bias") or ".indexer." in key[0]:
            assert after.equal(before[key])  # is not trained
            continue
        expected = muon_reference.steps(*key, before[key], hf)
        errors[key] = float((after.double() - expected).norm() / (expected - before[key].double()).norm())
    return errors


def check(outcomes, least=30):
    errors = {key: error for outcome in outcomes for key, error in outcome.items()}
    assert len(errors) >= least
    worst = max(errors, key=errors.get)
    print(f"largest error: {errors[worst]:.1e} {worst}")
    assert errors[worst] <= TOLERANCE, {key: error for key, error in errors.items() if error > TOLERANCE}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_every_layout(ranks, folder, name):
    """The update is the whole matrix's, with the distributed optimizer."""
    layout = (LAYOUTS | MORE)[name]
    check(ranks(layout["world"], muon_body, folder, layout, {}))


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", ["dp2·ep2", "tp2·etp2·dp2"])
def test_optimizer_that_is_not_distributed(ranks, folder, name):
    layout = (LAYOUTS | MORE)[name]
    check(ranks(layout["world"], muon_body, folder, layout, NO_DISTRIBUTED))


FAMILIES = ["qwen3_next", "gpt_oss", "deepseek_v3", "mimo_v2_flash"]
FURTHER = [
    "llama",
    "qwen2",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "minimax_m2",
    "dots1",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hy_v3",
    "qwen3_5_moe_text",
    "deepseek_v32",
    "glm_moe_dsa",
    "solar_open",
]


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.full_matrix) for family in FURTHER)]
)
def test_every_family(ranks, tmp_path, family):
    """Its fused weights are split as its layers compute; experts, routers and embeddings are found by its names."""
    from tests.bridges.tiny_models import LATENT_FAMILIES, save_tiny

    groups = {} if family in LATENT_FAMILIES else {"num_key_value_heads": 2}
    model = save_tiny(family, tmp_path / family, num_hidden_layers=4, **groups)
    layout = dict(world=2, tp=2)
    check(ranks(2, muon_body, model, layout, {}))


def test_every_table_tells_its_matrices():
    """Every family's table has a split; a conversion that nobody has described is refused by name."""
    import dataclasses

    from bridges.conversions import Conversion
    from bridges.errors import BridgeError
    from bridges.matrices import matrix_blocks, without_split
    from bridges.plan import Plan
    from tests.bridges.tiny_models import TINY, tiny_config

    class Folded(Conversion):
        pass

    for family in TINY:
        entries = Plan.of(tiny_config(family)).entries
        assert not list(without_split(entries)), family
    entry = next(each for each in entries if each.name.endswith("linear_proj.weight"))
    strange = dataclasses.replace(entry, bound=dataclasses.replace(entry.bound, conversion=Folded()))
    with pytest.raises(BridgeError, match=r"linear_proj\.weight: the table does not say which matrices Folded fuses"):
        matrix_blocks(strange)


def scale_body(folder, layout, overrides):
    """Per weight: whether clipping, and a rate of 0 for what AdamW trains, changed it."""
    clipped = engine_of(folder, layout, overrides | {f"{OPTIMIZER}max_grad_norm": 1e-4})
    take_steps(clipped, range(2))
    with_clip = weights_of(clipped)
    plain = engine_of(folder, layout, overrides)
    before = weights_of(plain)
    take_steps(plain, range(2))
    return {
        name: (after.equal(with_clip[name]), after.equal(before[name])) for name, after in weights_of(plain).items()
    }


def test_clipping_and_the_other_rate(ranks, folder):
    """A norm that clips by 1e6 leaves the matrices' updates alone, and ``adam_lr=0`` trains nothing but matrices."""
    (found,) = ranks(1, scale_body, folder, dict(world=1), {f"{OPTIMIZER}adam_lr": 0.0})
    for (name, _), (unclipped, unchanged) in found.items():
        matrix = "_proj" in name
        assert unclipped and unchanged != matrix, name
    (found,) = ranks(1, scale_body, folder, dict(world=1), {})
    assert {"_proj" in name: same for (name, _), (same, _) in found.items()} == {True: True, False: False}
