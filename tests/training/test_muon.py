"""Muon in every layout against float64 on whole tensors; its checkpoints, settings and mistakes."""

import json

import pytest

from tests.training import bodies, muon_reference
from tests.training.bodies import MEGATRON

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
    from bridges.rules import shard
    from skyrl_megatron.runtime.model.local_weights import local_weights

    for weight in local_weights(engine.model, engine.groups, of=lambda parameter: parameter.main_grad):
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


def muon_body(folder, layout, overrides):
    """(HF name, expert) → relative error of its update after two steps."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=KEYS | overrides))
    before = weights_of(engine)
    take_steps(engine, range(muon_reference.STEPS))
    hf = json.loads((folder / "config.json").read_text())
    errors = {}
    for key, after in weights_of(engine).items():
        if key[0].endswith("e_score_correction_bias"):
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
