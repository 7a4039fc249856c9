"""A critic on real Megatron equals transformers and autograd: values, GAE, value loss, gradients, weights."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest

from tests.training import bodies, critic_reference, reference
from tests.training.test_step import CUTS, LAYOUTS, MORE

CRITIC = "trainer.critic.megatron_config."
PLAIN = ("tp2·cp2·ep4", "pp2·vpp2")
"""What the plain suite runs of the layouts."""


@dataclass
class Outcome:
    """What one rank saw."""

    values: float
    """Largest error of a value of its rows."""
    returns: float
    losses: list
    clipped: list
    grad_norm: float
    gradients: dict
    """HF name → error over the largest entry; {} when they are not looked at."""
    weights: dict


def config(folder, critic, *, world=1, vpp=None, overrides=None, **degrees):
    """A policy on one rank beside a critic at the given layout."""
    long = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "cp": "context",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    keys = {f"{CRITIC}{long[name]}_parallel_size": degree for name, degree in degrees.items()}
    keys |= {f"{CRITIC}virtual_pipeline_model_parallel_size": vpp} if vpp else {}
    return bodies.config(
        folder,
        overrides=keys
        | {
            "trainer.critic.model.path": str(critic),
            "trainer.placement.critic_num_gpus_per_node": world,
            f"{CRITIC}optimizer_config_kwargs.adam_eps": reference.ADAM_EPS,
            "trainer.critic.optimizer_config.lr": reference.LR,
            "trainer.critic.optimizer_config.max_grad_norm": reference.MAX_GRAD_NORM,
            "trainer.critic.optimizer_config.weight_decay": 0.0,
            "trainer.algorithm.advantage_estimator": "gae",
            "trainer.algorithm.gamma": critic_reference.GAMMA,
            "trainer.algorithm.lambd": critic_reference.LAMBDA,
            "trainer.algorithm.gae.critic_lambd": critic_reference.CRITIC_LAMBDA,
            "trainer.algorithm.value_clip": critic_reference.VALUE_CLIP,
        }
        | (overrides or {}),
    )


def with_advantages(batch, cfg):
    """Advantages and returns by the run's estimator."""
    from skyrl_megatron.algorithms.advantages import compute_advantages_and_returns

    algorithm, padded = cfg.trainer.algorithm, batch.padded()
    estimates = compute_advantages_and_returns(
        padded.rewards, padded.response_mask, batch.uids, "gae", algorithm, padded.values,
        gamma=algorithm.gamma, lambd=algorithm.lambd,
    )  # fmt: skip
    batch.advantages, batch.returns = map(batch.responses.flat, estimates)
    return batch


def critic_steps(folder, critic, batch, expected, layout, overrides, fault=None):
    """Values, returns and three steps on this rank's share of the batch; errors against the reference."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.critic import CriticEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf

    cfg = config(folder, critic, **layout, overrides=overrides)
    engine = CriticEngine(cfg)
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    part = batch.select(rows)
    losses, clipped, gradients = [], [], {}
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        part.values = engine.compute_values(part)
        part = with_advantages(part, cfg)
        for step in range(critic_reference.STEPS):
            measured = engine.forward_backward(part)
            losses.append(measured["critic_loss"])
            clipped.append(measured["values_clipfrac"])
            if step == 0 and not engine.optimizer.config.use_distributed_optimizer:
                engine.reduce_gradients()
                for piece in stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad):
                    want = expected.grads[piece.name]
                    gradients[piece.name] = float((piece.tensor - want).abs().max() / want.abs().max())
            result = engine.optim_step(more_follow=step < critic_reference.STEPS - 1)
            if step == 0:
                grad_norm = result.grad_norm
    weights = {
        piece.name: float((piece.tensor - expected.weights[piece.name]).abs().max())
        for piece in stream_hf(engine.model, engine.groups)
    }
    errors = [
        float((found - batch.responses.select(want, rows))[part.response_mask].abs().max())
        for found, want in ((part.values, expected.values), (part.returns, expected.returns))
    ]
    return Outcome(*errors, losses, clipped, grad_norm, gradients, weights)


def check(outcomes, expected):
    for outcome in outcomes:
        assert outcome.values <= 1e-5 and outcome.returns <= 2e-5
        assert outcome.losses == pytest.approx(expected.losses, rel=2e-5)
        assert outcome.clipped == pytest.approx(expected.clipped, abs=0.02)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for field, tolerance in (("gradients", bodies.GRADIENT_TOLERANCE), ("weights", bodies.WEIGHT_TOLERANCE)):
        errors = {name: error for outcome in outcomes for name, error in getattr(outcome, field).items()}
        if errors:
            assert set(errors) == set(expected.weights), f"{field}: some parameters were not looked at"
            worst = max(errors, key=errors.get)
            print(f"largest error of {field}: {errors[worst]:.1e} ({worst})")
            assert errors[worst] <= tolerance, f"{field} of {worst} are off by {errors[worst]:.1e}"


def values_of_the_token_itself():
    """The state after a token in place of the one in which it is chosen."""
    from skyrl_megatron.runtime import critic

    right = critic.response_values
    return mock.patch.object(critic, "response_values", lambda output, packed: right(output.roll(1, 1), packed))


def clip_forgotten():
    from skyrl_megatron.algorithms import objective as critic_objective

    right = critic_objective.ppo_critic_loss

    def free(values, old_values, *others):
        return right(values, values.detach(), *others)

    return mock.patch.object(critic_objective, "ppo_critic_loss", free)


FAULTS = {
    "values of the token itself": values_of_the_token_itself,
    "clip forgotten": clip_forgotten,
}


@pytest.fixture(scope="module")
def critic(folder, tmp_path_factory):
    return critic_reference.save_critic(folder, tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture(scope="module")
def rewarded(batch):
    return critic_reference.make_batch(batch)


@pytest.fixture(scope="module")
def expected(critic, rewarded, tmp_path_factory):
    expected = critic_reference.critic_steps(critic, rewarded, tmp_path_factory.mktemp("reference"))
    assert expected.clipped[0] == 0 and 0.2 < expected.clipped[2] < 0.9, "clipping shows"
    return expected


NO_DISTRIBUTED = {f"{CRITIC}optimizer_config_kwargs.use_distributed_optimizer": False}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in PLAIN else pytest.mark.full_matrix) for n in (LAYOUTS | MORE)]
)
def test_every_layout(ranks, folder, critic, rewarded, expected, name):
    layout = (LAYOUTS | MORE)[name]
    outcomes = ranks(layout["world"], critic_steps, folder, critic, rewarded, expected, layout, NO_DISTRIBUTED)
    check(outcomes, expected)


@pytest.mark.parametrize(
    "cut", [pytest.param(c, marks=[] if c == "padded" else pytest.mark.full_matrix) for c in CUTS]
)
def test_every_cut(ranks, folder, critic, rewarded, expected, cut):
    """The distributed optimizer; what concerns log-probs alone changes nothing."""
    overrides = {key.replace("trainer.policy.", "trainer.critic."): value for key, value in CUTS[cut].items()}
    outcomes = ranks(2, critic_steps, folder, critic, rewarded, expected, LAYOUTS["dp2·ep2"], overrides)
    check(outcomes, expected)


@pytest.mark.parametrize("fault", [*FAULTS, "policy's λ for the returns"])
def test_planted_faults_are_seen(ranks, folder, critic, rewarded, expected, fault):
    keys = NO_DISTRIBUTED
    if fault not in FAULTS:
        keys, fault = keys | {"trainer.algorithm.gae.critic_lambd": critic_reference.LAMBDA}, None
    outcomes = ranks(1, critic_steps, folder, critic, rewarded, expected, {}, keys, fault)
    with pytest.raises(AssertionError):
        check(outcomes, expected)


def values_body(folder, critic, batch):
    from skyrl_megatron.runtime.critic import CriticEngine

    return CriticEngine(config(folder, critic)).compute_values(batch)


def test_the_policy_learns_from_the_advantages(ranks, folder, critic, rewarded, expected, tmp_path):
    """PPO as a whole: values → GAE → the policy's three steps, at another layout than the critic's."""
    batch = rewarded.select(range(len(rewarded)))
    batch.values = ranks(1, values_body, folder, critic, batch)[0]
    batch = with_advantages(batch, config(folder, critic))
    assert (batch.advantages - expected.advantages)[batch.response_mask].abs().max() <= 2e-5
    wanted = rewarded.select(range(len(rewarded)))
    wanted.advantages = expected.advantages
    policy = reference.policy_gradient_step(folder, wanted, tmp_path)
    outcomes = ranks(2, bodies.three_steps, folder, batch, policy, LAYOUTS["dp2·ep2"], bodies.NO_DISTRIBUTED)
    bodies.check(outcomes, policy)


def offloaded_body(folder, critic, batch, layout, moves):
    """SHA-256 of weights and moments after three steps; with ``moves`` everything leaves the device around each."""
    import hashlib

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.critic import CriticEngine

    cfg = config(folder, critic, **layout)
    engine, digest = CriticEngine(cfg), hashlib.sha256()
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    part.values = engine.compute_values(part)
    part = with_advantages(part, cfg)
    for _ in range(3):
        if moves:
            engine.offload()
            assert engine.device_bytes() == 0
        engine.forward_backward(part)
        engine.optim_step()
    engine.onload()
    assert engine.device_bytes() > 0
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    for owned in owned_ranges(engine.optimizer):
        for _, tensor in sorted(owned.tensors.items()):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "name", ["single", *(pytest.param(n, marks=pytest.mark.full_matrix) for n in ("dp2·ep2", "tp2·pp2"))]
)
def test_leaving_the_device_changes_nothing(ranks, folder, critic, rewarded, name):
    layout = LAYOUTS[name]
    stayed, left = (
        ranks(layout["world"], offloaded_body, folder, critic, rewarded, layout, moves) for moves in (False, True)
    )
    assert stayed == left


def resumed_body(folder, critic, batch, root):
    """Digests of a critic after four steps, and of another that loaded the checkpoint of the second and went on."""
    from megatron.core import parallel_state

    from skyrl_megatron.runtime.checkpoint.rank_files import RankState
    from skyrl_megatron.runtime.critic import CriticEngine
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.checkpoint.training import held_by_name

    cfg = config(folder, critic)

    def state(engine):
        return RankState(list(engine.chunks), engine.groups, engine.optimizer, engine.lr_schedule)

    def train(engine, steps):
        for _ in range(steps):
            part = batch.select(range(len(batch)))
            part.values = engine.compute_values(part)
            engine.forward_backward(with_advantages(part, cfg))
            engine.optim_step()

    first = CriticEngine(cfg, total_steps=10)
    train(first, 2)
    saver = RankCheckpointer(root, state(first), seed=0)
    saver.save(2)
    saver.close()
    train(first, 2)
    found = held_by_name(first)
    parallel_state.destroy_model_parallel()
    second = CriticEngine(cfg, total_steps=10)
    train(second, 1)  # something else is to be replaced
    RankCheckpointer(root, state(second)).load()
    train(second, 2)
    return found, held_by_name(second)


def test_a_resumed_critic_is_the_uninterrupted_one(ranks, folder, critic, rewarded, tmp_path):
    whole, resumed = ranks(1, resumed_body, folder, critic, rewarded, str(tmp_path))[0]
    assert resumed == whole and any("output_layer" in name and "exp_avg" in name for name in whole)


def head_body(folder, critic, seed, prefix):
    from skyrl_megatron.runtime.critic import CriticEngine

    keys = {"trainer.seed": seed, "trainer.algorithm.value_head_prefix": prefix}
    engine = CriticEngine(config(folder, critic, overrides=keys))
    return engine.model.chunks[-1].output_layer.weight.detach()


def test_where_the_head_comes_from(ranks, folder, critic, tmp_path):
    """From the folder by its prefix or as exports name it, else from the seed; a wrong one is named."""
    import torch
    from safetensors.torch import load_file

    from tests.support.rank_pool import RankFailure

    saved = load_file(critic / "model.safetensors")["value_head.weight"]
    assert torch.equal(ranks(1, head_body, folder, critic, 1, "value_head")[0], saved)
    named = critic_reference.save_critic(folder, tmp_path / "named", "v_head.weight")
    assert torch.equal(ranks(1, head_body, folder, named, 1, "v_head")[0], saved)
    exported = critic_reference.save_critic(folder, tmp_path / "exported", "score.weight")
    assert torch.equal(ranks(1, head_body, folder, exported, 1, "value_head")[0], saved)
    fresh = [ranks(1, head_body, folder, folder, seed, "value_head")[0] for seed in (1, 1, 2)]
    assert torch.equal(fresh[0], fresh[1]) and not torch.equal(fresh[0], fresh[2])
    with pytest.raises(RankFailure, match=r"(?s)ModelLoadError: .*unknown v_head\.weight"):
        ranks(1, head_body, folder, named, 1, "value_head")
