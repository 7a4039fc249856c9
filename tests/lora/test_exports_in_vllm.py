"""Exported adapters of runs with and without ``use_rslora``, with dropout, opened by vLLM from their folders."""

import pytest

from tests.support import engines

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
FAMILIES = {  # with dense layers, experts, shared experts, gated delta nets, and a vision tower beside
    "qwen3": dict(rank_stabilised=True, dropout=0.25),
    "qwen3_moe": dict(rank_stabilised=True, dropout=0.25),
    "glm4_moe": dict(rank_stabilised=False),
    "qwen3_5_moe_text": dict(rank_stabilised=True),
    "qwen3_5_moe": dict(rank_stabilised=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_applies_an_exported_adapter(ranks, tmp_path, family):
    """Log-probs with the adapter's folder are those of transformers with the merged weights."""
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterSlots
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.runtime.model.description import read_hf_model
    from skyrl_megatron_lora.targets import select
    from skyrl_megatron_lora.tensors import adapter_pairs, target_modules
    from tests.lora import reference
    from tests.lora.test_peft_drops import export_body
    from tests.support.tiny_models import write_tiny_model

    base = write_tiny_model(family, tmp_path / "base")
    plan = read_hf_model(base).plan
    factors = reference.start_factors(plan, separate=False)
    ranks(1, export_body, base, factors, tmp_path, **{"dropout": 0.25} | FAMILIES[family])
    targets = target_modules({"": adapter_pairs(plan, select(plan, "all-linear"), 8, 8)})
    settings = engines.tiny_settings(base, adapters=AdapterSlots(8, targets), max_model_len=128)
    loop, engine = engines.LoopThread(), VLLMEngine(settings)
    try:
        loop(engine.start(), engines.START_S)
        found, plain = (loop(score(engine, path)) for path in (tmp_path / "adapter", None))
        loop(engine.shutdown())
    finally:
        loop.close()
    expected = engines.reference_logprobs(tmp_path / "merged", engines.PROBE)
    print(f"{family}: {engines.largest_gap(expected, found):.2g}, without {engines.largest_gap(expected, plain):.2g}")
    assert engines.largest_gap(expected, plain) > 0.05
    assert engines.largest_gap(expected, found) < 2e-4


async def score(engine, adapter):
    """Log-probs of the probe's tokens by vLLM's own reader of adapter folders."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    request = None if adapter is None else LoRARequest("exported", 7, str(adapter))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    prompt = {"prompt_token_ids": list(engines.PROBE)}
    calls = engine._llm.generate(prompt, params, f"probe {adapter}", lora_request=request)
    last = [output async for output in calls][-1]
    return [each[token].logprob for each, token in zip(last.prompt_logprobs[1:], engines.PROBE[1:], strict=True)]
