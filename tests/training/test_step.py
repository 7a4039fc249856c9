"""The policy-gradient step on real Megatron equals transformers and autograd, in every layout and for every cut."""

import contextlib

import pytest

from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

LAYOUTS = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "dp2·ep2": dict(world=2, ep=2),
    "tp2·pp2": dict(world=4, tp=2, pp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
    "pp2·cp2·ep2": dict(world=4, pp=2, cp=2, ep=2),
}
MORE = {
    "dp2": dict(world=2),
    "dp4": dict(world=4),
    "pp2": dict(world=2, pp=2),
    "pp4": dict(world=4, pp=4),
    "cp2": dict(world=2, cp=2),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "tp2·dp2·ep2": dict(world=4, tp=2, ep=2),
    "pp2·vpp2·cp2·ep2": dict(world=4, pp=2, vpp=2, cp=2, ep=2),
    "pp2·dp2·ep2": dict(world=4, pp=2, ep=2),
}
CUTS = {
    "one row a micro-batch": {"trainer.micro_train_batch_size_per_gpu": 1},
    "token budget": {"trainer.max_tokens_per_microbatch": 40},
    "padded": {"trainer.use_sample_packing": False},
    "recompute full": {"trainer.gradient_checkpointing": True},
    "recompute selective": {
        "trainer.gradient_checkpointing": True,
        f"{MEGATRON}transformer_config_kwargs.recompute_granularity": "selective",
    },
    "from hidden states": {"trainer.fused_lm_head_logprob": True, "trainer.logprobs_chunk_size": 7},
}


SUPPORTED = {
    "tp2": dict(layout=dict(world=2, tp=2)),
    "cp2": dict(layout=dict(world=2, cp=2)),
    "tp2 from hidden states": dict(layout=dict(world=2, tp=2), overrides=CUTS["from hidden states"]),
    "padded": dict(layout=dict(world=1), overrides=CUTS["padded"]),
    "dp2": dict(layout=dict(world=2)),
    "pp2": dict(layout=dict(world=2, pp=2)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("tp2", "cp2") else pytest.mark.full_matrix) for name in SUPPORTED],
)
def test_tokens_sampled_from_a_part_of_the_vocabulary(ranks, folder, batch, tmp_path, name):
    """Log-probs, entropies, gradients and weights are those of a softmax over what each token was sampled from."""
    supported = reference.with_support(batch, 1003)
    supported = reference.with_logprobs(supported, reference.all_logprobs(folder, supported))
    assert (supported.old_logprobs - batch.old_logprobs).abs().max() > 0.1
    expected = reference.policy_gradient_step(folder, supported, tmp_path)
    layout, overrides = SUPPORTED[name]["layout"], NO_DISTRIBUTED | SUPPORTED[name].get("overrides", {})
    outcomes = ranks(layout["world"], bodies.three_steps, folder, supported, expected, layout, overrides)
    bodies.check(outcomes, expected)


@pytest.fixture(scope="module")
def expected(folder, batch, tmp_path_factory):
    return reference.policy_gradient_step(folder, batch, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(ranks, folder, batch, expected, name):
    layout = LAYOUTS[name]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, NO_DISTRIBUTED)
    bodies.check(outcomes, expected)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", MORE)
def test_more_layouts(ranks, folder, batch, expected, name):
    layout = MORE[name]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, NO_DISTRIBUTED)
    bodies.check(outcomes, expected)


@pytest.mark.parametrize("name", ["dp2·ep2"])
def test_distributed_optimizer(ranks, folder, batch, expected, name):
    layout = LAYOUTS[name]
    bodies.check(ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, {}), expected)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", [*LAYOUTS, *MORE])
def test_distributed_optimizer_in_every_layout(ranks, folder, batch, expected, name):
    layout = (LAYOUTS | MORE)[name]
    bodies.check(ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, {}), expected)


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(ranks, folder, batch, expected, cut):
    layout = LAYOUTS["dp2·ep2"]
    overrides = NO_DISTRIBUTED | CUTS[cut]
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, overrides)
    bodies.check(outcomes, expected)


@pytest.mark.parametrize(
    "name", ["tp2·cp2·ep4", *(pytest.param(name, marks=pytest.mark.full_matrix) for name in ("tp2", "pp2·vpp2"))]
)
def test_from_hidden_states(ranks, folder, batch, expected, name):
    """Log-probs straight from hidden states: their gradient is summed over the ranks of the vocabulary."""
    layout = LAYOUTS[name]
    overrides = NO_DISTRIBUTED | CUTS["from hidden states"]
    bodies.check(ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, overrides), expected)


def test_overlapped_reduction_and_gathering(ranks, folder, batch, expected):
    """Weights are whole after each step, though Megatron would gather them in the next forward pass."""
    layout = LAYOUTS["dp2·ep2"]
    overrides = {f"{MEGATRON}ddp_config.{name}": True for name in ("overlap_grad_reduce", "overlap_param_gather")}
    bodies.check(ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, overrides), expected)


@pytest.mark.parametrize(
    "fault, layout",
    [
        ("KL counts twice", dict(world=1)),
        ("one micro-batch dropped", dict(world=1)),
        ("gradient times cp", dict(world=2, cp=2)),
        ("softmax over the local vocabulary", dict(world=2, tp=2)),
    ],
)
def test_planted_faults_are_seen(ranks, folder, batch, expected, fault, layout):
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, expected, layout, NO_DISTRIBUTED, fault)
    with pytest.raises(AssertionError):
        bodies.check(outcomes, expected)


AUXILIARY = {
    f"{MEGATRON}moe_router_load_balancing_type": "aux_loss",
    f"{MEGATRON}moe_aux_loss_coeff": 0.1,
    f"{MEGATRON}moe_z_loss_coeff": 0.05,
}


@pytest.fixture(scope="module")
def with_auxiliary(folder, batch, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("auxiliary")
    return reference.policy_gradient_step(folder, batch, scratch, aux_coefficient=0.1, z_coefficient=0.05)


@pytest.mark.parametrize("name", ["single", "tp2·pp2", "tp2·cp2·ep4"])
def test_auxiliary_losses(ranks, folder, batch, with_auxiliary, name):
    """The same micro-batches in every layout: the load-balancing loss is not linear in a micro-batch."""
    layout = LAYOUTS[name]
    overrides = NO_DISTRIBUTED | AUXILIARY
    outcomes = ranks(layout["world"], bodies.three_steps, folder, batch, with_auxiliary, layout, overrides)
    bodies.check(outcomes, with_auxiliary)


def router_metrics(folder, batch, layout):
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine

    overrides = {f"{MEGATRON}moe_per_layer_logging": True, "trainer.gradient_checkpointing": True}
    engine = MegatronEngine(bodies.config(folder, **layout, overrides=overrides))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    engine.compute_logprobs(part)  # does not count
    first = engine.forward_backward(part)
    return first, engine.forward_backward(part)


@pytest.mark.parametrize("name", ["single", "tp2·cp2·ep4", pytest.param("pp2·cp2·ep2", marks=pytest.mark.full_matrix)])
def test_router_metrics(ranks, folder, batch, name):
    """Each token counts once for each layer, though layers are recomputed and a sequence is padded and split."""
    loads = reference.router_load(folder, batch)
    expected = {"moe_load_imbalance": [load for load, _ in loads], "moe_router_entropy": [h for _, h in loads]}
    for calls in ranks(LAYOUTS[name]["world"], router_metrics, folder, batch, LAYOUTS[name]):
        for metrics in calls:
            for metric, values in expected.items():
                assert [metrics[f"{metric}/layer_{n}"] for n in range(4)] == pytest.approx(values, rel=1e-5)
                assert metrics[metric] == pytest.approx(sum(values) / 4, rel=1e-5)


def without_a_pass(folder, batch, loss):
    """(metrics, gradient norm) of a step with the trainer's own log-probs from before it, and without them."""
    import copy

    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.types import OWN_LOGPROBS

    engine = MegatronEngine(bodies.config(folder, overrides={"trainer.algorithm.policy_loss_type": loss}))
    given, bare = copy.copy(batch), copy.copy(batch)
    given.old_logprobs, bare.old_logprobs = engine.compute_logprobs(batch), None
    with pytest.raises(ValueError, match="reads old log-probs") if loss == "regular" else contextlib.nullcontext():
        engine.forward_backward(bare)
    engine.clear_gradients()
    bare.metadata = {OWN_LOGPROBS: True}
    found = []
    for each in (given, bare):
        metrics = engine.forward_backward(each)
        engine.reduce_gradients()
        found.append((metrics, [buffer.grad_data.clone() for chunk in engine.chunks for buffer in chunk.buffers]))
        engine.clear_gradients()
    difference = max(float((a - b).abs().max()) for a, b in zip(found[0][1], found[1][1], strict=True))
    largest = max(float(a.abs().max()) for a in found[0][1])
    gap = (given.old_logprobs - batch.rollout_logprobs).abs()[batch.loss_mask]
    return found[0][0], found[1][0], difference / largest, float(gap.max()), float(gap.mean())


@pytest.mark.parametrize("loss", ["regular", "cross_entropy"])
def test_the_training_pass_gives_the_log_probs_before_a_single_update(ranks, folder, batch, loss):
    """Same loss, same gradient; and how far they are from the engine's, which no other pass measured."""
    [(given, bare, difference, largest, mean)] = ranks(1, without_a_pass, folder, batch, loss)
    assert difference <= 1e-6
    assert bare["final_loss"] == pytest.approx(given["final_loss"], abs=1e-6)
    assert bare["rollout_train_logprobs_abs_diff_max"] == pytest.approx(largest, abs=1e-5)
    assert bare["rollout_train_logprobs_abs_diff_mean"] == pytest.approx(mean, abs=1e-5)
    assert not any("abs_diff" in name for name in given)


def three_exact_steps(folder, batch, expected, layout, overrides):
    """Three steps with ``trainer.exact_rollouts``."""
    from skyrl_megatron.algorithms import exact_ops

    try:
        return bodies.three_steps(folder, batch, expected, layout, overrides | {"trainer.exact_rollouts": True})
    finally:
        exact_ops.use(False)


@pytest.mark.parametrize(
    "layout",
    [
        {"world": 1},
        pytest.param({"world": 2, "pp": 2}, marks=pytest.mark.full_matrix),
        pytest.param({"world": 2, "ep": 2}, marks=pytest.mark.full_matrix),
    ],
    ids=["single", "pp2", "dp2·ep2"],
)
@pytest.mark.parametrize("cut", ["recompute full", "from hidden states"])
def test_exact_operations_train_as_the_ordinary_ones(ranks, folder, batch, expected, layout, cut):
    overrides = NO_DISTRIBUTED | CUTS[cut]
    bodies.check(ranks(layout["world"], three_exact_steps, folder, batch, expected, layout, overrides), expected)
