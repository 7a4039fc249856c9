"""An engine of a quantised folder that starts without weights and gets the base dequantised, the adapter in it."""

from __future__ import annotations

import pytest

from tests.lora import bodies
from tests.lora.adapter_ranks import BUCKET_BYTES, AdapterRank
from tests.support.engines import largest_gap, reference_logprobs, tiny_settings
from tests.support.quantised import quantise
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
EXACT = 1e-5
"""Nats: how far the engine may be from the merged model."""
PLAIN = {"load_format": "dummy", "hf_overrides": {"quantization_config": None}}
"""What ``skyrl_megatron_observe/preflight/model_checks.py`` asks for."""


class MergedRank(AdapterRank):
    """A rank that sends its base with the adapter in it."""

    def source(self):
        from skyrl_megatron_lora.source import MergedWeightSource

        return MergedWeightSource(self.engine.adapters, self.engine.groups)


def test_it_serves_the_merged_model(ranks, engines, tmp_path):
    import json

    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer
    from tests.weight_sync.megatron_ranks import MegatronRanks

    folder, plain = quantise(write_tiny_model("qwen3_moe", tmp_path / "model", 0), tmp_path, "fp8")
    loop, layout = engines.loop, dict(tp=2, etp=2, overrides=bodies.KEYS)
    with engines.pool(tiny_settings(folder, extra=PLAIN), wait_s=20) as pool:
        with MegatronRanks(ranks, folder, 2, layout, BUCKET_BYTES, kind=MergedRank) as trainer:
            trainer.together("adapt", 3)
            trainer.together("export", tmp_path / "merged")
            hf = json.loads((folder / "config.json").read_text())
            options = dict(dtype="float32", bucket_sizes=(BUCKET_BYTES,), phase_s=60.0, deadline_s=300.0)
            report = loop(WeightSynchronizer(pool, trainer.handles, hf_config=hf, **options).sync("first"), 300)
        assert not report.failures
        found, expected = loop(pool.slots[0].engine.score(TOKENS)), reference_logprobs(tmp_path / "merged", TOKENS)
        assert largest_gap(found, expected) <= EXACT
        assert largest_gap(reference_logprobs(plain, TOKENS), expected) > 100 * EXACT
