"""Engines that take adapters of some of their modules only."""

from __future__ import annotations

import pytest

from tests.lora import bodies
from tests.lora.adapter_ranks import adapted, ranks_with_adapters, synchronizer
from tests.support.engines import largest_gap, reference_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
EXACT = 1e-5
"""Nats: how far an engine with an adapter may be from the merged model."""
ATTENTION = {f"{bodies.LORA}train_mlp": False}


def test_adapters_of_attention_alone(ranks, engines, loop, folder, tmp_path):
    """vLLM's own kernel for experts, and a trainer in another layout."""
    with engines.pool(adapted(folder, ATTENTION), wait_s=20) as pool:
        assert pool.slots[0].engine.settings.adapters.targets == ("k_proj", "o_proj", "q_proj", "v_proj")
        with ranks_with_adapters(ranks, folder, dict(world=2, pp=2), ATTENTION) as trainer:
            trainer.together("adapt", 3)
            trainer.together("export", tmp_path / "merged")
            loop(synchronizer(pool, trainer, folder, ATTENTION).sync("attention"), 300)
        found = loop(pool.slots[0].engine.score(TOKENS))
        assert largest_gap(found, reference_logprobs(tmp_path / "merged", TOKENS)) <= EXACT


def test_an_engine_that_would_ignore_experts_says_so(ranks, engines, loop, folder):
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterSlots

    slots = AdapterSlots(8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    with engines.pool(adapted(folder, adapters=slots), wait_s=20) as pool:
        with ranks_with_adapters(ranks, folder, dict(world=1)) as trainer:
            with pytest.raises(WeightSyncError, match=r"the engine would ignore the adapters of .*experts\.down_proj"):
                loop(synchronizer(pool, trainer, folder).sync("ignored"), 300)
