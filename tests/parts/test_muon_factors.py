"""Muon on adapters: each factor is a matrix of its own, whole in every layout, against float64 on PEFT's factors."""

import math

import pytest

from tests.lora import bodies, reference
from tests.parts.test_muon import (
    CHECKPOINT,
    KEYS,
    TOLERANCE,
    cut_matrices,
    folder,  # noqa: F401
    from_and_to_adam,
    there_and_back,
)
from tests.training import muon_reference

SEPARATE = {f"{bodies.HOW}lora_type": "canonical_lora"}
SAVED = {
    f"{bodies.LORA}rank": 4,
    f"{bodies.LORA}alpha": 8,
    f"{bodies.LORA}target_modules": "self_attn,mlp,embed_tokens,lm_head",
    f"{bodies.HOW}experts_shared_outer_loras": True,
}
"""Also factors of the vocabulary, which AdamW trains, and factors that all experts have in common."""
LAYOUTS = {
    "tp2·etp2": (dict(world=2, tp=2, etp=2), {}),
    "dp2·ep2": (dict(world=2, ep=2), SEPARATE),
}
MORE = {
    "single": (dict(world=1), {}),
    "tp2·dp2·ep2": (dict(world=4, tp=2, ep=2), {}),
    "pp2·vpp2": (dict(world=2, pp=2, vpp=2), {}),
    "tp2": (dict(world=2, tp=2), SEPARATE),
}


def plan_of(folder):  # noqa: F811
    from skyrl_megatron.runtime.model.description import read_hf_model

    return read_hf_model(folder).plan


def set_gradients(engine, whole):
    """Give every factor its share of the whole gradients, as after their reduction."""
    from skyrl_megatron_lora.folder import fill_factors

    factors = list(engine.adapters.factors())
    before = [factor.tensor.detach().clone() for factor in factors]
    fill_factors(engine.adapters, engine.groups, reference.finder(whole))
    for factor, weights in zip(factors, before, strict=True):
        factor.tensor.main_grad.copy_(factor.tensor.detach())
        factor.tensor.data.copy_(weights)


def muon_body(folder, layout, overrides, gradients, start, cut):  # noqa: F811
    """``HF module.letter`` → factor after the steps, on the ranks that gather it. ``cut``: a rank has part of one."""
    from skyrl_megatron.runtime.optimizer import step_if_finite
    from skyrl_megatron_lora.folder import stream_factors

    engine = bodies.adapted_engine(folder, layout, KEYS | overrides, start)
    assert not cut or any(each.dim() == 2 for each in cut_matrices(engine.optimizer))
    for whole in gradients:
        set_gradients(engine, whole)
        assert not step_if_finite(engine.optimizer, engine.lr_schedule, engine.chunks).skipped
        engine.optimizer.zero_grad()
    streamed = stream_factors(engine.adapters, engine.groups)
    return {f"{each.module}.{each.letter}": each.tensor.detach().clone() for each in streamed}


def expected_factor(start, gradients):
    """A factor after Muon's steps, in float64."""
    import torch

    now, momentum = start.double().clone(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in gradients:
        momentum = muon_reference.MOMENTUM * momentum + (1 - muon_reference.MOMENTUM) * gradient.double()
        direction = muon_reference.MOMENTUM * momentum + (1 - muon_reference.MOMENTUM) * gradient.double()
        update = 0.2 * math.sqrt(max(now.shape)) * muon_reference.orthogonal(direction)
        now = now * (1 - muon_reference.LR * muon_reference.DECAY) - muon_reference.LR * update
    return now


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full_matrix) for name in MORE)])
def test_every_layout(ranks, folder, name):  # noqa: F811
    """Also the rows of a B that serves q, k, v or gate, up are separate matrices, as those of the weight are."""
    layout, keys = (LAYOUTS | MORE)[name]
    plan, separate = plan_of(folder), bool(keys)
    start = reference.start_factors(plan, separate=separate)
    gradients = [reference.start_factors(plan, separate=separate, seed=seed) for seed in (11, 12)]
    outcomes = ranks(layout["world"], muon_body, folder, layout, keys, gradients, start, name == "tp2·dp2·ep2")
    found = {key: factor for outcome in outcomes for key, factor in outcome.items()}
    assert found.keys() == start.keys()
    errors = {}
    for key, before in start.items():
        after = expected_factor(before, [each[key] for each in gradients])
        errors[key] = float((found[key].double() - after).norm() / (after - before.double()).norm())
    worst = max(errors, key=errors.get)
    print(f"largest error: {errors[worst]:.1e} {worst}")
    assert errors[worst] <= TOLERANCE


def moments_body(folder, keys):  # noqa: F811
    """Name of each factor → its moments after a step; bytes of all moments, and as ``--check`` counts them."""
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.optimizer import step_if_finite
    from skyrl_megatron_observe.estimate.memory_parameters import AdapterTable, ParameterTable, rank_bytes

    engine = bodies.adapted_engine(folder, {}, KEYS | keys)
    for factor in engine.adapters.factors():
        factor.tensor.main_grad.fill_(1.0)
    step_if_finite(engine.optimizer, engine.lr_schedule, engine.chunks)
    names = {id(factor.tensor): factor.name for factor in engine.adapters.factors()}
    held = list(owned_ranges(engine.optimizer))
    moments = {names[id(each.parameter)]: sorted(set(each.tensors) - {"param"}) for each in held}
    size = sum(tensor.nbytes for each in held for name, tensor in each.tensors.items() if name != "param")
    table, one = ParameterTable(engine.model.hf.plan), ParallelConfig(1)
    factors = AdapterTable.of(engine.cfg, table.plan, table.top_k).stage(one, 0, te=False)
    megatron = engine.cfg.trainer.policy.megatron_config
    how = dict(bf16=False, trained=True, adapters=factors, muon=True)
    return moments, size, rank_bytes(table.stage(one, 0, frozen=True), one, megatron, **how).optimizer


def test_embedding_and_output_layer_are_trained_by_adamw(ranks, folder):  # noqa: F811
    targets = {f"{bodies.LORA}target_modules": "lm_head,embed_tokens,o_proj"}
    ((found, size, counted),) = ranks(1, moments_body, folder, targets)
    assert len(found) == 2 * 2 + 2 * 4
    for name, moments in found.items():
        assert moments == (["momentum_buffer"] if "linear_proj" in name else ["exp_avg", "exp_avg_sq"]), name
    assert size == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dp2·ep2", "tp2"),
        pytest.param("tp2·dp2·ep2", "pp2·vpp2", marks=pytest.mark.full_matrix),
        pytest.param("pp2·cp2·ep2", "tp2·etp2", marks=pytest.mark.full_matrix),
    ],
)
def test_saved_in_one_layout_and_loaded_in_another(ranks, tmp_path, source, target):
    saved = there_and_back(ranks, tmp_path, source, target, CHECKPOINT | SAVED)
    assert {name for _, name in saved} == {"param", "momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert all("adapters" in parameter for parameter, _ in saved)


@pytest.mark.parametrize("muon", ["saved", "loaded"])
def test_from_and_to_adam(ranks, tmp_path, muon):
    from_and_to_adam(ranks, tmp_path, muon, SAVED)
