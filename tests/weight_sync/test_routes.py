"""Routes that are recorded from a live vLLM model: carried out, they make what its loaders make, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.engines import tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm
EXTENSION = {"worker_extension_cls": "tests.weight_sync.route_extension.RouteExtension"}
FAMILIES = {
    "qwen3": dict(tie_word_embeddings=True, vocab_size=509),
    "mixtral": {},
    "olmoe": {},
}


def found(loop, folder, checks, **settings):
    """What the checks (arguments of ``route_against_loaders``) find on each worker of an engine."""
    from skyrl_megatron.inference.vllm.engine import VLLMEngine

    async def ask():
        engine = VLLMEngine(tiny_settings(folder, extra=EXTENSION, **settings))
        await engine.start()
        try:
            await engine.pause()
            call = engine._llm.collective_rpc
            return [await call("route_against_loaders", args=(str(folder), *check)) for check in checks]
        finally:
            await engine.shutdown()

    return loop(ask(), 590)


def test_a_route_is_what_loaders_do(loop, tmp_path):
    folder = write_tiny_model("qwen3_moe", tmp_path, 1, vocab_size=509)
    same, fused, adds, computes = found(loop, folder, [(False,), (True,), (False, "adds"), (False, "computes")])
    assert same == [[]] and fused == [[]]
    assert "a loader does more than copy: aten.add_.Tensor on weight of RMSNorm" in adds[0][0]
    assert "aten.mul" in computes[0][0]


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(loop, tmp_path, model_type):
    folder = write_tiny_model(model_type, tmp_path, 1, **FAMILIES[model_type])
    assert found(loop, folder, [(False,)]) == [[[]]]


@pytest.mark.full_matrix
def test_workers_that_share_a_model(loop, tmp_path):
    folder = write_tiny_model("qwen3_moe", tmp_path, 1, vocab_size=509)
    assert found(loop, folder, [(False,), (True,)], tensor_parallel_size=2) == [[[], []], [[], []]]
