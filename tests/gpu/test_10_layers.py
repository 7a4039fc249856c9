"""Transformer Engine's layers against ours: log-probs of a batch and the gradient of every parameter."""

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.training import bodies, reference

pytestmark = pytest.mark.needs("te", "gpu")
PROVES = "Transformer Engine's layers compute, forward and backward, what the layers do that CPU tests compare"
REPORT = "the parameters named with their errors: one layer's, or all behind it"
SIZES = dict(num_hidden_layers=4, hidden_size=64, moe_intermediate_size=32, num_key_value_heads=2)
FAMILIES = {
    "qwen3_moe": dict(**SIZES, head_dim=64),
    "qwen2_moe": dict(SIZES, num_attention_heads=4),
    "glm4_moe": dict(**SIZES, head_dim=64),
    "deepseek_v3": dict(SIZES, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32,
                        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine_is_as_near_as_ours(ranks, tmp_path, family):
    folder = save_tiny(family, tmp_path / "hf", initializer_range=0.1, **FAMILIES[family])
    batch = reference.make_batch(vocab_size=1003)
    exact = ranks(1, bodies.one_backward, folder, batch, "local", {"trainer.bf16": False})[0]
    ours = ranks(1, bodies.one_backward, folder, batch, "local", {"trainer.bf16": True})[0]
    theirs = ranks(1, bodies.one_backward, folder, batch, "transformer_engine", {"trainer.bf16": True})[0]
    bodies.check_as_near(theirs, ours, exact)
