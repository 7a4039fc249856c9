"""The policy-gradient step on real Megatron, in every layout, against transformers and autograd."""

import pytest

from tests.training import reference

PLAIN = {
    "single": dict(world=1),
    "tp2": dict(world=2, tp=2),
    "pp2": dict(world=2, pp=2),
    "cp2": dict(world=2, cp=2),
    "dp2·ep2": dict(world=2, ep=2),
}


def config(folder, *, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1, world=1, **overrides):
    from skyrl_megatron.config import SkyRLTrainConfig

    keys = {
        "trainer.policy.model.path": str(folder),
        "trainer.policy.megatron_config.tensor_model_parallel_size": tp,
        "trainer.policy.megatron_config.pipeline_model_parallel_size": pp,
        "trainer.policy.megatron_config.context_parallel_size": cp,
        "trainer.policy.megatron_config.expert_model_parallel_size": ep,
        "trainer.policy.megatron_config.expert_tensor_parallel_size": etp,
        "trainer.placement.policy_num_gpus_per_node": world,
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.kl_loss_coef": reference.KL,
        "trainer.algorithm.use_entropy_loss": True,
        "trainer.algorithm.entropy_loss_coef": reference.ENTROPY,
        "trainer.algorithm.eps_clip_low": reference.CLIP_LOW,
        "trainer.algorithm.eps_clip_high": reference.CLIP_HIGH,
        "trainer.algorithm.temperature": reference.TEMPERATURE,
        "trainer.policy.optimizer_config.lr": 1e-2,
        "trainer.policy.optimizer_config.max_grad_norm": 0.1,
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.gradient_checkpointing": False,
        "trainer.micro_train_batch_size_per_gpu": 3,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        **({"trainer.policy.megatron_config.virtual_pipeline_model_parallel_size": vpp} if vpp else {}),
        **overrides,
    }
    return SkyRLTrainConfig.from_cli_overrides(keys)


def logprobs_and_step(folder, batch, layout, overrides):
    """On every rank: log-probs, metrics and gradient norm of one step."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.micro_batches import split_for_dp

    engine = MegatronEngine(config(folder, **layout, **overrides))
    mine = split_for_dp(batch.lengths, engine.dp_size, engine.flops)[engine.dp_rank]
    part = batch.select(mine)
    logprobs = engine.compute_logprobs(part)
    metrics = engine.forward_backward(part)
    result = engine.optim_step()
    return mine, logprobs, metrics, result.grad_norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.bridges.tiny_models import save_tiny

    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), num_hidden_layers=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def batch(folder):
    batch = reference.make_batch(vocab_size=1003)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))


@pytest.fixture(scope="module")
def expected(folder, batch):
    return reference.policy_gradient_step(folder, batch)


@pytest.mark.parametrize("name", PLAIN)
def test_step_equals_transformers(ranks, folder, batch, expected, name):
    layout = PLAIN[name]
    results = ranks(layout["world"], logprobs_and_step, folder, batch, layout, {})
    for rows, logprobs, metrics, grad_norm in results:
        want = reference.all_logprobs(folder, batch)[rows]
        assert (logprobs - want).abs().max() < 1e-4
        assert metrics["policy_loss"] == pytest.approx(expected.policy_loss, abs=1e-5)
        assert metrics["policy_kl"] == pytest.approx(expected.kl, rel=1e-4)
        assert metrics["policy_entropy"] == pytest.approx(expected.entropy, rel=1e-5)
        assert metrics["final_loss"] == pytest.approx(expected.final_loss, abs=1e-5)
        assert grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
