"""Muon in every layout against float64 on whole tensors; its checkpoints, settings and mistakes."""

import json

import pytest

from tests.support.rank_pool import end_layout
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
        if key[0].endswith(("e_score_correction_bias", ".expert_bias")) or ".indexer." in key[0]:
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
    end_layout()
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


CHECKPOINT = {
    f"{OPTIMIZER}optimizer": "muon",
    f"{OPTIMIZER}adam_lr": 1e-3,
    f"{KWARGS}muon_coefficient_type": "simple",
}


def saved_body(folder, root, layout, keys):
    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, layout, **keys)
    training.train(engine, [1, 2])
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    assert checkpointer.save(2)
    checkpointer.close()
    return ranges_of(engine), training.train(engine, [3, 4])


def loaded_body(folder, root, layout, keys, again=None):
    """What a rank has after the load, losses of the steps after, messages; ``again``: saves what it loaded there."""
    import warnings

    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, layout, seed=7, **keys)
    training.train(engine, [10])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RankCheckpointer(root, training.state_of(engine)).load()
    if again:
        checkpointer = RankCheckpointer(again, training.state_of(engine))
        assert checkpointer.save(2)
        checkpointer.close()
    return ranges_of(engine), training.train(engine, [3, 4]), [str(each.message) for each in caught]


def ranges_of(engine):
    """(parameter, tensor) → values, whole if dp is 1."""
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges

    names = {
        id(each): f"{i} {name}" for i, chunk in enumerate(engine.chunks) for name, each in chunk.named_parameters()
    }
    return {
        (names[id(each.parameter)], name): value.clone()
        for each in owned_ranges(engine.optimizer)
        for name, value in each.tensors.items()
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [("single", "dp2·ep2"), pytest.param("tp2·dp2·ep2", "pp2·vpp2", marks=pytest.mark.full_matrix)],
)
def test_saved_in_one_layout_and_loaded_in_another(ranks, tmp_path, source, target):
    """There and back: masters and momentum are bit-equal, and the steps after are the same."""
    from tests.checkpoint import training

    folder, there, back = training.save_model(tmp_path / "model"), str(tmp_path / "a"), str(tmp_path / "b")
    worlds = [training.LAYOUTS[name]["world"] for name in (source, target)]
    saved = ranks(worlds[0], saved_body, folder, there, source, CHECKPOINT)
    moved = ranks(worlds[1], loaded_body, folder, there, target, CHECKPOINT, back)
    returned = ranks(worlds[0], loaded_body, folder, back, source, CHECKPOINT)
    assert {name for _, name in saved[0][0]} == {"param", "momentum_buffer", "exp_avg", "exp_avg_sq"}
    for (held, losses), (found, again, _) in zip(saved, returned, strict=True):
        assert found.keys() == held.keys() and all(found[key].equal(held[key]) for key in held)
        assert again == losses
    for found, expected in zip(moved[0][1], saved[0][1], strict=True):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("muon", ["saved", "loaded"])
def test_from_and_to_adam(ranks, tmp_path, muon):
    """Masters are those of the checkpoint. What the other optimizer did not save is zero, and a message says so."""
    from tests.checkpoint import training

    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    keys = [CHECKPOINT, {}] if muon == "saved" else [{}, CHECKPOINT]
    ((held, _),) = ranks(1, saved_body, folder, root, "single", keys[0])
    ((found, _, messages),) = ranks(1, loaded_body, folder, root, "single", keys[1])
    (message,) = [each for each in messages if "another optimizer" in each]
    assert ("exp_avg" in message) == (muon == "saved") and ("momentum_buffer" in message) == (muon == "loaded")
    for (name, kind), value in found.items():
        if kind == "param" or (muon == "loaded" and kind != "momentum_buffer"):
            assert value.equal(held[name, kind]), (name, kind)
        else:
            assert not value.any(), (name, kind)
