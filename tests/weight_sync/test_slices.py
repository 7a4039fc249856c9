"""Routes that are recorded from a live vLLM model: carried out, they make what its loaders make, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.engines import tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.engines("extended")]
EXTENDED = {"worker_extension_cls": "tests.weight_sync.faulty_copies.FaultyCopies"}
"""An engine whose worker compares routes with loaders, and makes the mistakes that are planted in it."""
FAMILIES = {
    "qwen3": dict(tie_word_embeddings=True, vocab_size=509),
    "mixtral": {},
    "olmoe": {},
}


def found(engines, folder, checks, **settings):
    """What the checks (arguments of ``route_against_loaders``) find on each worker of an engine."""

    async def ask(engine):
        await engine.pause()
        call = engine._llm.collective_rpc
        return [await call("route_against_loaders", args=(str(folder), *check)) for check in checks]

    with engines.pool(tiny_settings(folder, extra=EXTENDED, **settings)) as pool:
        return engines.loop(ask(pool.slots[0].engine))


def test_a_route_is_what_loaders_do(engines, models):
    checks = [(False,), (True,), (False, "adds"), (False, "computes")]
    same, fused, adds, computes = found(engines, models["A"], checks)
    assert same == [[]] and fused == [[]]
    assert "a loader does more than copy: aten.add_.Tensor on weight of RMSNorm" in adds[0][0]
    assert "aten.mul" in computes[0][0]


@pytest.mark.full_matrix
@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(engines, tmp_path, model_type):
    folder = write_tiny_model(model_type, tmp_path, 1, **FAMILIES[model_type])
    assert found(engines, folder, [(False,)]) == [[[]]]


@pytest.mark.full_matrix
def test_workers_that_share_a_model(engines, models):
    assert found(engines, models["A"], [(False,), (True,)], tensor_parallel_size=2) == [[[], []], [[], []]]
