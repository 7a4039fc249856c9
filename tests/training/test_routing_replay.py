"""Training with given experts: equal to transformers with its routers forced to them, wherever the layers run."""

import copy

import pytest

from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

REPLAY = NO_DISTRIBUTED | {f"{MEGATRON}moe_enable_routing_replay": True, f"{MEGATRON}moe_per_layer_logging": True}
KWARGS = f"{MEGATRON}transformer_config_kwargs."
WAYS = {
    "packed": {},
    "padded": {"trainer.use_sample_packing": False},
    "recomputed layers": {"trainer.gradient_checkpointing": True},
    "recomputed experts": {
        "trainer.gradient_checkpointing": True,
        f"{KWARGS}recompute_granularity": "selective",
        f"{KWARGS}recompute_modules": ["moe"],
    },
}
LAYOUTS = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "cp2": dict(world=2, cp=2),
    "pp2": dict(world=2, pp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "dp2·ep2": dict(world=2, ep=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "pp2·cp2·ep2": dict(world=4, pp=2, cp=2, ep=2),
    "tp2·pp2·vpp2": dict(world=4, tp=2, pp=2, vpp=2),
}
PLAIN = [("tp2", "packed"), ("pp2·vpp2", "recomputed layers"), ("cp2", "recomputed experts"), ("single", "padded")]
MATRIX = [
    (layout, way)
    for layout in LAYOUTS
    for way in WAYS
    if (layout, way) not in PLAIN and not (way == "padded" and "cp2" in layout)  # which needs packing
]


@pytest.fixture(scope="module")
def routed(folder, batch):
    """The batch with experts that no router chose, and the log-probs that follow."""
    routed = reference.with_routes(batch, layers=4, experts=4, top_k=2)
    return reference.with_logprobs(routed, reference.all_logprobs(folder, routed))


@pytest.fixture(scope="module")
def expected(folder, routed, tmp_path_factory):
    return reference.policy_gradient_step(folder, routed, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    "layout, way", [*PLAIN, *(pytest.param(*each, marks=pytest.mark.full_matrix) for each in MATRIX)]
)
def test_it_is_the_model_with_these_experts(ranks, folder, routed, expected, layout, way):
    """Losses, gradients (the routers' too) and weights, with one row a micro-batch: several are in flight."""
    overrides = REPLAY | WAYS[way] | {"trainer.micro_train_batch_size_per_gpu": 1}
    layout = LAYOUTS[layout]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, routed, expected, layout, overrides)
    bodies.check(outcomes, expected)


def test_routes_change_the_step(folder, batch, routed):
    """What the other tests compare differs by far more than their tolerances."""
    natural = reference.with_logprobs(batch, reference.all_logprobs(folder, batch))
    assert (natural.old_logprobs - routed.old_logprobs).abs().max() > 0.1


@pytest.mark.parametrize(
    "fault, layout, way",
    [
        ("scores are those of the choice", "single", "packed"),
        ("routes of the next layer", "single", "packed"),
        ("routes of another row", "single", "packed"),
        ("recomputed without routes", "single", "recomputed experts"),
    ],
)
def test_planted_faults_are_seen(ranks, folder, routed, expected, fault, layout, way):
    rows = 3 if fault == "routes of another row" else 1
    overrides = REPLAY | WAYS[way] | {"trainer.micro_train_batch_size_per_gpu": rows}
    layout = LAYOUTS[layout]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, routed, expected, layout, overrides, fault)
    with pytest.raises(AssertionError):
        bodies.check(outcomes, expected)


@pytest.mark.full_matrix
@pytest.mark.parametrize("way", ["recomputed layers", "recomputed experts"])
def test_rows_of_one_length_keep_their_own_routes(ranks, folder, routed, tmp_path, way):
    """Two micro-batches in flight that only their routes tell apart. With those of the newest the check fails."""
    alike = routed.select([4, 5])
    assert len({len(routes) for routes in alike.rollout_routes}) == 1
    wanted = reference.policy_gradient_step(folder, alike, tmp_path)
    overrides, layout = REPLAY | WAYS[way] | {"trainer.micro_train_batch_size_per_gpu": 1}, LAYOUTS["pp2"]
    bodies.check(ranks(2, bodies.three_steps, folder, alike, wanted, layout, overrides), wanted)
    with pytest.raises(AssertionError):
        fault = "newest routes recomputed"
        bodies.check(ranks(2, bodies.three_steps, folder, alike, wanted, layout, overrides, fault), wanted)


def one_pass(folder, batch, layout, overrides):
    """Log-probs, loss and the gradient of every parameter."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=overrides))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    logprobs = engine.compute_logprobs(part)
    metrics = engine.forward_backward(part)
    engine.reduce_gradients()
    pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
    return logprobs, metrics, {piece.name: piece.tensor.clone() for piece in pieces}


@pytest.mark.parametrize(
    "layout, way",
    [
        ("dp2·ep2", "packed"),
        *(
            pytest.param(layout, way, marks=pytest.mark.full_matrix)
            for layout, way in [("tp2", "recomputed layers"), ("pp2·vpp2", "recomputed experts"), ("single", "padded")]
        ),
    ],
)
def test_the_experts_that_the_model_takes_change_nothing(ranks, folder, batch, layout, way):
    """Replayed and natural passes are the same bit for bit, and no token would have gone elsewhere."""
    import torch

    batch = reference.with_logprobs(batch, reference.all_logprobs(folder, batch))
    routed = reference.natural_routes(folder, batch)
    layout = LAYOUTS[layout]
    given, free = (
        ranks(layout["world"], one_pass, folder, each, layout, REPLAY | WAYS[way]) for each in (routed, batch)
    )
    for (logprobs, metrics, gradients), (own, plain, theirs) in zip(given, free, strict=True):
        assert torch.equal(logprobs, own) and metrics["final_loss"] == plain["final_loss"]
        assert gradients.keys() == theirs.keys() and all(torch.equal(gradients[n], theirs[n]) for n in gradients)
        assert metrics["moe_routing_mismatch"] == 0.0 and metrics["moe_routing_replayed"] == 1.0
        assert "moe_routing_mismatch" not in plain


@pytest.mark.parametrize(
    "name", ["single", *(pytest.param(n, marks=pytest.mark.full_matrix) for n in ("tp2", "pp2·vpp2", "dp2·ep2"))]
)
def test_mismatch_is_the_share_of_tokens_that_would_go_elsewhere(ranks, folder, batch, routed, name):
    """Of each layer, against transformers' own choice in the run with these experts."""
    wanted = reference.mismatch(folder, routed)
    layout = LAYOUTS[name]
    for _, metrics, _ in ranks(layout["world"], one_pass, folder, routed, layout, REPLAY | WAYS["recomputed experts"]):
        for layer, share in enumerate(wanted):
            assert metrics[f"moe_routing_mismatch/layer_{layer}"] == pytest.approx(share, abs=1e-12)
        replayed = sum(len(routes) for routes in routed.rollout_routes if routes is not None)
        assert metrics["moe_routing_replayed"] == pytest.approx(replayed / routed.lengths.sum(), abs=1e-12)


def test_bad_routes_are_named(ranks, folder, routed):
    found = ranks(1, refused, folder, routed)[0]
    uid = "prompt-2"
    assert found["twice"] == (
        f"uid {uid}, token 1, layer 2: the engine's route [3, 3] does not have 2 different experts from 0 to 3"
    )
    assert f"uid {uid}, token 1, layer 2: the engine's route [3, 4] does not have" in found["out of range"]
    assert "routes have 3 layers and 2 experts per token, the model has 4 layers and 2 experts" in found["layers"]
    assert "uid prompt-0: the engine returned no experts for token 10 of " in found["missing"]
    assert found["taught"] > 0


def refused(folder, batch):
    """What the engine says of wrong routes in row 4, and of those that row 1 lacks."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine, found = MegatronEngine(bodies.config(folder, overrides=REPLAY)), {}
    for name, route in {"twice": [3, 3], "out of range": [3, 4], "layers": None}.items():
        wrong = copy.deepcopy(batch)
        if route is None:
            wrong.rollout_routes[4] = wrong.rollout_routes[4][:, :3]
        else:
            wrong.rollout_routes[4][1, 2] = route
        with pytest.raises(ValueError, match="uid") as caught:
            engine.forward_backward(wrong)
        found[name] = str(caught.value)
    engine.megatron.moe_routing_replay_missing = "error"
    with pytest.raises(ValueError, match="uid") as caught:
        engine.forward_backward(batch)
    taught = engine.forward_backward(batch, objective=engine.objective({"policy_loss_type": "cross_entropy"}))
    engine.cfg.trainer.algorithm.policy_loss_type = "cross_entropy"  # of sampled rows
    with pytest.raises(ValueError, match="returned no experts"):
        engine.forward_backward(batch)
    return found | {"missing": str(caught.value), "taught": taught["policy_loss"]}
