"""The policy-gradient step on a GPU: the bodies of ``tests/training`` in fp32 and bf16, and what only a GPU runs."""

import pytest

from tests.training import bodies, reference
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

PROVES = "a training step equals transformers in fp32, is near it in bf16, and what only a GPU has changes nothing"
REPORT = "loss, entropy and gradient norm that are compared, and the parameter named with its error"
BF16 = {"trainer.bf16": True, f"{MEGATRON}moe_enable_routing_replay": True}
FP32 = {"trainer.bf16": False}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from tests.bridges.tiny_models import save_tiny

    # Sizes that bf16 grouped products take (multiples of 8), heads of 64 for flash attention.
    sizes = dict(num_hidden_layers=4, hidden_size=64, moe_intermediate_size=32, head_dim=64, num_key_value_heads=2)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), initializer_range=0.1, **sizes)


@pytest.fixture(scope="session")
def batch(folder):
    batch = reference.make_batch(vocab_size=1003)
    return reference.with_logprobs(batch, reference.all_logprobs(folder, batch))


@pytest.fixture(scope="session")
def expected(folder, batch, tmp_path_factory):
    return reference.policy_gradient_step(folder, batch, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def routed(folder, batch):
    """The batch with the experts that its tokens take in fp32: rounding to bf16 sends a few tokens to other experts,
    and the gradient of an expert with few tokens then has nothing to be compared with."""
    return reference.natural_routes(folder, batch)


@pytest.fixture(scope="session")
def expected_routed(folder, routed, tmp_path_factory):
    return reference.policy_gradient_step(folder, routed, tmp_path_factory.mktemp("reference"))


def run(ranks, folder, batch, expected, overrides):
    """On local layers, which take fp32 and need no Transformer Engine."""
    local = {f"{MEGATRON}transformer_config_kwargs.transformer_impl": "local"}
    return ranks(1, bodies.three_steps, folder, batch, expected, {}, NO_DISTRIBUTED | local | overrides)[0]


@pytest.mark.parametrize(
    "overrides",
    [{}, {"trainer.use_sample_packing": False}, {"trainer.fused_lm_head_logprob": True}],
    ids=["packed", "padded", "from hidden states"],
)
def test_fp32_equals_transformers(ranks, folder, batch, expected, overrides):
    bodies.check([run(ranks, folder, batch, expected, FP32 | overrides)], expected)


def test_bf16_is_near_transformers(ranks, folder, routed, expected_routed):
    """bf16 has 8 bits: a relative error of 2 % in the norm of the gradient, 5 % of the largest entry of each."""
    expected = expected_routed
    outcome = run(ranks, folder, routed, expected, BF16)
    assert outcome.metrics["final_loss"] == pytest.approx(expected.final_loss, rel=0.05, abs=0.02)
    assert outcome.metrics["policy_entropy"] == pytest.approx(expected.entropy, rel=0.02)
    assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    worst = max(outcome.gradients, key=outcome.gradients.get)
    assert outcome.gradients[worst] < 0.1, f"gradient of {worst} is off by {outcome.gradients[worst]:.2g}"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"trainer.fused_lm_head_logprob": True}, id="from hidden states"),
        pytest.param({"trainer.gradient_checkpointing": True}, id="recomputed"),
        pytest.param(
            {f"{MEGATRON}optimizer_config_kwargs.optimizer_cpu_offload": True,
             f"{MEGATRON}optimizer_config_kwargs.optimizer_offload_fraction": 1.0,
             f"{MEGATRON}optimizer_config_kwargs.use_distributed_optimizer": True},
            id="moments on the host", marks=pytest.mark.needs("gpu"),
        ),
    ],
)  # fmt: skip
def test_variants_agree_in_bf16(ranks, folder, routed, expected_routed, overrides):
    """Against plain bf16, with the distance to the reference as the measure of what rounding does."""
    plain = run(ranks, folder, routed, expected_routed, BF16)
    variant = run(ranks, folder, routed, expected_routed, BF16 | overrides)
    assert variant.metrics["final_loss"] == pytest.approx(plain.metrics["final_loss"], rel=0.02, abs=0.01)
    assert variant.grad_norm == pytest.approx(plain.grad_norm, rel=0.02)
    for name, error in variant.weights.items():
        assert error <= 2 * plain.weights[name] + 1e-2, f"weights of {name}"
