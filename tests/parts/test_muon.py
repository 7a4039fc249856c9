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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-MoE whose data-parallel shards begin and end within matrices of attention, a dense layer and experts."""
    from tests.bridges.tiny_models import save_tiny

    sizes = dict(num_hidden_layers=4, num_key_value_heads=2, vocab_size=131, mlp_only_layers=[1])
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), initializer_range=0.2, **sizes)


def cut_matrices(optimizer):
    """Matrices of which this rank updates a part."""
    from skyrl_megatron.runtime.checkpoint.rank_state import held_ranges, inner_optimizers

    return [
        held.parameter
        for part in inner_optimizers(optimizer)
        for held in held_ranges(part)
        if id(held.main) in part.optimizer.scale_invariant and held.stop - held.start < held.parameter.numel()
    ]


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


def muon_body(folder, layout, overrides, shards=1, cut=False):
    """(HF name, expert) → relative error of its update after two steps. ``cut``: a rank has part of some matrix."""
    engine = engine_of(folder, layout, overrides)
    assert not cut or any(each.dim() == 2 for each in cut_matrices(engine.optimizer))
    before = weights_of(engine)
    take_steps(engine, range(muon_reference.STEPS))
    hf = json.loads((folder / "config.json").read_text())
    errors = {}
    for key, after in weights_of(engine).items():
        if key[0].endswith(("e_score_correction_bias", ".expert_bias")) or ".indexer." in key[0]:
            assert after.equal(before[key])  # is not trained
            continue
        expected = muon_reference.steps(*key, before[key], hf, shards)
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
    check(ranks(layout["world"], muon_body, folder, layout, {}, cut="dp" in name))


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", ["dp2·ep2", "tp2·etp2·dp2"])
def test_optimizer_that_is_not_distributed(ranks, folder, name):
    layout = (LAYOUTS | MORE)[name]
    check(ranks(layout["world"], muon_body, folder, layout, NO_DISTRIBUTED))


def test_blockwise(ranks, folder):
    """Each shard of tensor parallelism is a matrix of its own, q, k, v, gate and up within it separate."""
    keys = {f"{KWARGS}muon_tp_mode": "blockwise"}
    check(ranks(2, muon_body, folder, LAYOUTS["tp2·etp2"], keys, 2))


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
    from bridges.plan import Plan
    from bridges.rules import without_split
    from tests.bridges.tiny_models import TINY, tiny_config

    for family in TINY:
        assert not list(without_split(Plan.of(tiny_config(family)).entries)), family


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
    return ranges_of(engine), training.train(engine, [3, 4]), ranges_of(engine)


def loaded_body(folder, root, layout, keys, again=None):
    """What a rank has after the load, losses of two steps, what it has then, messages; ``again``: saves what it loaded
    there."""
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
    held, messages = ranges_of(engine), [str(each.message) for each in caught]
    return held, training.train(engine, [3, 4]), ranges_of(engine), messages


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
    saved = there_and_back(ranks, tmp_path, source, target, CHECKPOINT)
    assert {name for _, name in saved} == {"param", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def there_and_back(ranks, tmp_path, source, target, keys):
    """Assert that masters and moments are bit-equal, and again after two steps; return those that rank 0 saved."""
    from tests.checkpoint import training

    folder, there, back = training.save_model(tmp_path / "model"), str(tmp_path / "a"), str(tmp_path / "b")
    worlds = [training.LAYOUTS[name]["world"] for name in (source, target)]
    saved = ranks(worlds[0], saved_body, folder, there, source, keys)
    moved = ranks(worlds[1], loaded_body, folder, there, target, keys, back)
    returned = ranks(worlds[0], loaded_body, folder, back, source, keys)
    for (held, losses, end), (found, again, same, _) in zip(saved, returned, strict=True):
        assert again == losses
        for before, after in ((held, found), (end, same)):
            assert after.keys() == before.keys() and all(after[key].equal(before[key]) for key in before)
    for found, expected in zip(moved[0][1], saved[0][1], strict=True):
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6)
    return saved[0][0]


def background_body(folder, root):
    """What a rank held when a save in the background began, and what another engine loads, after a step meanwhile."""
    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    engine = training.engine(folder, "dp2·ep2", **CHECKPOINT)
    training.train(engine, [1, 2])
    held = ranges_of(engine)
    checkpointer = RankCheckpointer(root, training.state_of(engine), asynchronous=True)
    checkpointer.save(2)
    training.train(engine, [3])
    checkpointer.finish()
    moved = ranges_of(engine)
    checkpointer.close()
    RankCheckpointer(root, training.state_of(engine)).load()
    return held, moved, ranges_of(engine)


def test_saved_in_the_background(ranks, tmp_path):
    """A checkpoint is that of the step at which it began."""
    from tests.checkpoint import training

    folder = training.save_model(tmp_path / "model")
    for held, moved, loaded in ranks(2, background_body, folder, str(tmp_path / "run")):
        assert loaded.keys() == held.keys() and all(loaded[key].equal(held[key]) for key in held)
        assert not any(moved[key].equal(held[key]) for key in held if key[1] == "momentum_buffer")


def test_a_draft_head(ranks, tmp_path):
    """The layer of multi-token prediction has the same rule: its projection is a matrix, its norms are not."""
    from tests.training import draft_reference

    model = draft_reference.save_with_draft("deepseek_v3", tmp_path / "model")
    outcomes = ranks(2, muon_body, model, dict(world=2, tp=2), {f"{MEGATRON}mtp.train": True})
    assert any("eh_proj" in name for outcome in outcomes for name, _ in outcome)
    check(outcomes)


@pytest.mark.parametrize("muon", ["saved", "loaded"])
def test_from_and_to_adam(ranks, tmp_path, muon):
    from_and_to_adam(ranks, tmp_path, muon, {})


def from_and_to_adam(ranks, tmp_path, muon, both):
    """Masters are those of the checkpoint. What the other optimizer did not save is zero, and a message says so."""
    from tests.checkpoint import training

    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    keys = [CHECKPOINT, {}] if muon == "saved" else [{}, CHECKPOINT]
    ((held, *_),) = ranks(1, saved_body, folder, root, "single", keys[0] | both)
    ((found, _, _, messages),) = ranks(1, loaded_body, folder, root, "single", keys[1] | both)
    (message,) = [each for each in messages if "another optimizer" in each]
    assert ("exp_avg" in message) == (muon == "saved") and ("momentum_buffer" in message) == (muon == "loaded")
    for (name, kind), value in found.items():
        if kind == "param" or (muon == "loaded" and kind != "momentum_buffer"):
            assert value.equal(held[name, kind]), (name, kind)
        else:
            assert not value.any(), (name, kind)


def masters_body(folder):
    """Largest distance of a master from float64's, relative to the parameter's update, in a bfloat16 model; and bytes
    of the optimizer before and after its first step, and as ``--check`` counts them."""
    from bridges.plan import Plan
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime.checkpoint.rank_state import held_ranges, inner_optimizers
    from skyrl_megatron.runtime.offload import optimizer_tensors, pending_state_bytes
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable, rank_bytes
    from skyrl_megatron_parts.muon import newton_schulz
    from tests.checkpoint.test_variants import bf16_state

    def held():
        distinct = {each.data_ptr(): each.nbytes for each in optimizer_tensors(state.optimizer) if each.dim()}
        return sum(distinct.values())

    options = {"muon_nesterov": False, "muon_coefficient_type": "simple", "muon_momentum": 0.0}
    state = bf16_state(folder, {}, 1, options, optimizer="muon")
    pending, start = pending_state_bytes(state.optimizer), held()
    (proj,) = [
        each
        for part in inner_optimizers(state.optimizer)
        for each in held_ranges(part)
        if each.parameter is state.model_chunks[0].module.decoder.layers[1].self_attention.linear_proj.weight
    ]
    before, gradient = proj.main.double().clone(), proj.parameter.detach().double().sin()
    for chunk in state.model_chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(parameter.detach().float().sin())
    state.optimizer.prepare_grads()
    state.optimizer.step_with_ready_grads()
    rows, columns = gradient.shape
    update = newton_schulz(gradient, [(3.4445, -4.7750, 2.0315)] * 5) * 0.2 * max(rows, columns) ** 0.5
    expected = before * (1 - 1e-2 * 0.01) - 1e-2 * update.reshape(-1)
    error = float((proj.main.double() - expected).norm() / (expected - before).norm())
    rounded = bool((proj.parameter.detach().reshape(-1) == proj.main.bfloat16()).all())
    count = ParameterTable(Plan.of(json.loads((folder / "config.json").read_text()))).stage(ParallelConfig(1), 0)
    megatron = SkyRLTrainConfig().trainer.policy.megatron_config
    counted = rank_bytes(count, ParallelConfig(1), megatron, bf16=True, trained=True, muon=True).optimizer
    return error, rounded, start + pending, held(), counted


def test_masters_of_bfloat16_and_the_memory_of_the_state(ranks, tmp_path):
    """fp32 masters take the update, the weights are their rounding, and memory is what ``--check`` counts: 8 bytes of
    a matrix's element, 12 of another's."""
    from tests.checkpoint import training

    ((error, rounded, predicted, held, counted),) = ranks(1, masters_body, training.save_model(tmp_path / "model"))
    assert error < 1e-4  # masters are fp32, and the update is a hundredth of a weight
    assert rounded
    assert held == pytest.approx(counted, rel=1e-3)
    assert predicted == pytest.approx(held, rel=1e-3)


def offload_body(folder, overrides):
    """Weights after two steps, with everything on the host in between, and without."""
    found = []
    for leaves in (False, True):
        engine = engine_of(folder, dict(world=1), overrides)
        for step in range(2):
            take_steps(engine, [step])
            if leaves:
                engine.offload()
                assert set(engine.away()) == {"weights", "gradients", "optimizer"}
                engine.onload()
        found.append(weights_of(engine))
        end_layout()
    return found


def test_offload(ranks, folder):
    ((stays, leaves),) = ranks(1, offload_body, folder, {})
    assert len(stays) > 30 and all(each.equal(leaves[name]) for name, each in stays.items())


def critic_body(folder, keys):
    """Names of the moments of a critic's value head and matrices after a step, and whether it changed."""
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.critic import CriticEngine
    from skyrl_megatron.runtime.optimizer import step_if_finite

    engine = CriticEngine(bodies.config(folder, overrides=keys))
    head = engine.chunks[0].module.output_layer.weight
    before = head.detach().clone()
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1.0)
    step_if_finite(engine.optimizer, engine.lr_schedule, engine.chunks)
    moments = {each.parameter is head: set(each.tensors) for each in owned_ranges(engine.optimizer)}
    kinds = {frozenset(each.tensors) for each in owned_ranges(engine.optimizer)}
    return sorted(moments[True]), len(kinds), not before.equal(head)


def test_critic(ranks, folder):
    """The critic has Muon for itself; AdamW trains its value head."""
    keys = {
        "trainer.critic.model.path": str(folder),
        "trainer.placement.critic_num_gpus_per_node": 1,
        "trainer.algorithm.advantage_estimator": "gae",
        "trainer.critic.optimizer_config.optimizer": "muon",
    }
    assert ranks(1, critic_body, folder, keys) == [(["exp_avg", "exp_avg_sq", "param"], 2, True)]


def test_what_megatron_would_take_for_a_matrix(tmp_path):
    """Why its own module is not used: routers count as matrices, and q, k, v have the same sizes in all layers."""
    import types

    import torch
    from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes, _is_nonlinear_or_embedding

    from bridges.plan import Plan
    from bridges.rules import matrix_blocks
    from tests.bridges.tiny_models import tiny_config

    hf = tiny_config("mimo_v2_flash")
    plan = Plan.of(hf)
    router = next(each for each in plan.entries if each.name.endswith("router.weight"))
    assert not _is_nonlinear_or_embedding(torch.empty(router.shape)) and matrix_blocks(router) is None
    sizes = {matrix_blocks(each).rows for each in plan.entries if each.name.endswith("linear_qkv.weight")}
    assert len(sizes) == 2  # layers with a window have other groups
    config = types.SimpleNamespace(
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
    )
    assert tuple(_get_qkv_split_shapes(config)) not in sizes  # its values have another size than its keys
