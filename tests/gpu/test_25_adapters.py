"""Low-rank adapters on a GPU: on our layers in fp32 against PEFT, on Transformer Engine's against ours."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.lora import bodies, reference
from tests.training import reference as step
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED, check_as_near

PROVES = "adapters are PEFT's in fp32, and hang on Transformer Engine's linear maps, those with a norm and experts too"
REPORT = "the factors named with their errors: of one kind of map, or of all"
LOCAL = {f"{MEGATRON}transformer_config_kwargs.transformer_impl": "local"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = dict(num_hidden_layers=4, hidden_size=64, moe_intermediate_size=32, head_dim=64, num_key_value_heads=2)
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), initializer_range=0.1, **sizes)


@pytest.fixture(scope="module")
def factors(folder):
    from skyrl_megatron.runtime.model.description import read_hf_model

    return reference.start_factors(read_hf_model(folder).plan, separate=False)


def test_fp32_equals_peft(ranks, folder, factors):
    batch = step.make_batch(vocab_size=1003)
    batch = step.with_logprobs(batch, step.all_logprobs(folder, batch))
    expected = reference.steps(folder, batch, factors, tied=True)
    overrides = NO_DISTRIBUTED | LOCAL | {"trainer.bf16": False}
    bodies.check(ranks(1, bodies.three_steps, folder, batch, expected, {}, overrides), expected)


@pytest.mark.needs("te", "gpu")
def test_transformer_engine_is_as_near_as_ours(ranks, folder, factors):
    batch = step.natural_routes(folder, step.make_batch(vocab_size=1003))  # bf16 would send tokens to other experts
    replay = {f"{MEGATRON}moe_enable_routing_replay": True}
    exact, ours, theirs = (
        ranks(1, bodies.one_backward, folder, batch, factors, layers, replay | {"trainer.bf16": bf16})[0]
        for layers, bf16 in (("local", False), ("local", True), ("transformer_engine", True))
    )
    check_as_near(theirs, ours, exact)
