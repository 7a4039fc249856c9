"""What an engine on CPU says that tokens were routed to, against transformers' own routers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.support.engines import tiny_settings

PROMPTS = [[(11 * i + i * i + 7 * k) % 380 + 5 for i in range(length)] for k, length in enumerate((9, 70, 33, 1, 150))]
SAMPLING = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
RECORDS = {
    "return_support": True,
    "enable_return_routed_experts": True,
    "max_num_batched_tokens": 64,  # the longest prompts come in pieces, beside others' tokens
    "max_num_seqs": 8,
}
"""Settings of an engine that says all it can of each token."""

pytestmark = [pytest.mark.vllm, pytest.mark.engines("records")]


@pytest.fixture(scope="module")
def model(tiny_moe):
    return tiny_moe["A"]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full_matrix)], ids=["tp1", "tp2"])
def engine(request, engines, model):
    with engines.pool(tiny_settings(model, tensor_parallel_size=request.param, **RECORDS)) as pool:
        yield lambda work: engines.loop(work(pool.slots[0].engine))


@pytest.fixture(scope="module")
def routes_of(model):
    """tokens → [n, L, K], the experts of every token in ascending order."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")

    def routes(token_ids):
        with torch.no_grad():
            logits = reference(torch.tensor([token_ids]), output_router_logits=True).router_logits
        chosen = [layer.topk(reference.config.num_experts_per_tok).indices.sort(-1).values for layer in logits]
        return torch.stack(chosen, 1).numpy()

    return routes


async def sample(engine, name, prompts):
    return await asyncio.gather(*(engine.generate(f"{name}-{i}", each, SAMPLING) for i, each in enumerate(prompts)))


def agree(samples, prompts, routes_of):
    for prompt, each in zip(prompts, samples, strict=True):
        tokens = [*prompt, *each.token_ids]
        assert each.routed_experts.dtype == np.uint8 and len(each.routed_experts) == len(tokens) - 1
        np.testing.assert_array_equal(np.sort(each.routed_experts, -1), routes_of(tokens)[:-1])


def test_every_token_has_the_experts_that_transformers_takes(engine, routes_of):
    """Of prompts that come in pieces, beside others that are decoded; then of prefixes from the cache, which are not
    computed again; then of a second turn."""
    agree(engine(lambda e: sample(e, "first", PROMPTS)), PROMPTS, routes_of)
    samples = engine(lambda e: sample(e, "again", PROMPTS))
    agree(samples, PROMPTS, routes_of)
    turns = [[*prompt, *each.token_ids, 17, 18, 19] for prompt, each in zip(PROMPTS, samples, strict=True)]
    agree(engine(lambda e: sample(e, "turn", turns)), turns, routes_of)


def test_a_request_that_ends_early(engine, routes_of):
    """Aborted: routes of what it has; its neighbours are not touched."""

    async def work(e):
        running = asyncio.gather(
            e.generate("long", PROMPTS[2], SAMPLING | {"max_tokens": 90}),
            e.generate("short", PROMPTS[4], SAMPLING),
        )
        await asyncio.sleep(0.1)
        assert not running.done()
        await e.abort("long")
        return await running

    agree(engine(work), [PROMPTS[2], PROMPTS[4]], routes_of)


def test_requests_that_are_frozen_while_the_cache_is_emptied(engine, routes_of):
    """As by a sync of weights, here of the same ones: every token has its experts all the same."""

    async def work(e):
        running = asyncio.gather(
            *(e.generate(f"frozen-{i}", PROMPTS[i], SAMPLING | {"max_tokens": 90}) for i in (0, 2))
        )
        await asyncio.sleep(0.1)
        await e.pause("keep")
        assert not running.done()
        await e.reset_prefix_cache()
        await e.resume()
        return await running

    agree(engine(work), [PROMPTS[0], PROMPTS[2]], routes_of)


def test_tokens_whose_experts_are_known_are_left_out(engine, routes_of):
    """Also where the first of them lies inside a cached block, or in a piece of a long prompt."""
    for number, start in enumerate((0, 1, 37, len(PROMPTS[4]))):
        keys = SAMPLING | {"routed_experts_prompt_start": start}
        sample = engine(lambda e, n=number, keys=keys: e.generate(f"known-{n}", PROMPTS[4], keys))
        wanted = routes_of([*PROMPTS[4], *sample.token_ids])[start:-1]
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), wanted)
