"""Every sampling parameter that is passed on shows in what an engine answers."""

import pytest

from tests.support.engines import tiny_settings
from tests.support.shown_keys import OUTPUT

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]
PROMPT = [(11 * i + i * i) % 380 + 5 for i in range(300)]  # more than a block of the prefix cache
SOME = {"allowed_token_ids": list(range(9, 21)), "ignore_eos": True}
ALWAYS_9 = {"logit_bias": {9: 100.0}}
BESIDE = {
    "bad_words": {"structured_outputs": {"regex": "[5-6]{40}"}},
    "frequency_penalty": SOME,
    "ignore_eos": {"logit_bias": {2: 100.0}},
    "min_tokens": {**ALWAYS_9, "stop_token_ids": [9]},
    "presence_penalty": SOME,
    "repetition_detection": ALWAYS_9,
    "stop_token_ids": ALWAYS_9,
}
"""Parameters of both requests, without which a key would not show."""


@pytest.fixture(scope="module")
def ask(engines, engine_loop, tiny_moe):
    """``ask(sampling)`` → vLLM's last output of a request."""
    from skyrl_megatron.inference.vllm.requests import sampling_parameters

    with engines.pool(tiny_settings(tiny_moe["A"])) as pool:
        llm = pool.slots[0].engine._llm

        async def last(sampling):
            parameters = sampling_parameters("keys", {"max_tokens": 12, "temperature": 1.0, "seed": 5} | sampling)
            async for output in llm.generate({"prompt_token_ids": PROMPT}, parameters, f"keys {id(sampling)}"):
                found = output
            return found

        yield lambda sampling: engine_loop(last(sampling))


@pytest.mark.parametrize("name", OUTPUT)
def test_each_parameter_shows(ask, tiny_moe, name):
    from transformers import AutoTokenizer

    value = OUTPUT[name]
    usual = {"ignore_eos": name in ("logit_bias", "allowed_token_ids"), **BESIDE.get(name, {})}
    ask(usual)  # from here on the prompt is cached
    plain, asked = ask(usual), ask(usual | {name: value})
    (before, after) = (list(each.outputs[0].token_ids) for each in (plain, asked))
    text = AutoTokenizer.from_pretrained(tiny_moe["A"]).decode(after)
    if name == "skip_reading_prefix_cache":
        assert plain.num_cached_tokens > 0 == asked.num_cached_tokens
        return
    assert before != after
    match name:
        case "allowed_token_ids":
            assert set(after) <= set(value)
        case "bad_words":
            assert value[0] not in text and len(after) == 12
        case "ignore_eos":
            assert (len(before), len(after)) == (1, 12)
        case "logit_bias":
            assert set(after) == set(value)
        case "min_tokens":
            assert (len(before), after[:6].count(9)) == (1, 0) and len(after) >= value
        case "frequency_penalty" | "presence_penalty":
            assert len(set(after)) > len(set(before))
        case "repetition_detection":
            assert (len(before), len(after)) == (12, 3)
        case "stop_token_ids":
            assert (len(before), len(after)) == (12, 1)
        case "structured_outputs":
            assert set(text) <= set("0123456789")
