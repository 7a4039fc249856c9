"""Several adapters of a run in real engines: each serves under its own name and version, and they switch together."""

from __future__ import annotations

import pytest

from tests.lora import bodies
from tests.lora.adapter_ranks import adapted, ranks_with_adapters, synchronizer
from tests.support.engines import largest_gap, reference_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.engines("adapters")]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
SAMPLING = {"max_tokens": 32, "temperature": 1.0, "ignore_eos": True}
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
EXACT = 1e-5
"""Nats: how far an engine with an adapter may be from the merged model."""
SEVERAL = {f"{bodies.LORA}adapters": {"math": {}, "code": {"alpha": 20}}}


@pytest.fixture(scope="module")
def pool(engines, folder):
    """One engine of two workers."""
    with engines.pool(adapted(folder, SEVERAL, tensor_parallel_size=2), wait_s=20) as pool:
        yield pool


@pytest.fixture
def trainer(ranks, folder):
    with ranks_with_adapters(ranks, folder, dict(world=2, ep=2), SEVERAL) as trainer:
        yield trainer


def scores(pool, loop):
    (slot,) = pool.alive()
    return {name: loop(slot.engine.score(TOKENS, name)) for name in ("math", "code")}


async def asked_over_http(client, models):
    """(status, token ids or message) of a request to the HTTP endpoint for each model."""
    import httpx

    from skyrl_megatron_agents.http_endpoint import TOKENS as PATH
    from skyrl_megatron_agents.http_endpoint import build_app

    app, found = build_app(client, "policy", "token", adapters=("math", "code")), []
    transport, headers = httpx.ASGITransport(app), {"Authorization": "Bearer token"}
    async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers, timeout=120) as talk:
        for model in models:
            body = {"model": model, "token_ids": TOKENS[:20], "sampling_params": GREEDY}
            answer = await talk.post(PATH, json=body)
            openai = await talk.post("/v1/completions", json={"model": model, "prompt": TOKENS[:20], "max_tokens": 1})
            assert openai.status_code == answer.status_code, openai.text
            said = answer.json()
            found.append((answer.status_code, said.get("error", {}).get("message") or said["choices"][0]["token_ids"]))
    return found


@pytest.mark.full_matrix
def test_slots_take_what_the_budget_says(pool, loop, folder):
    import json

    from bridges.plan import Plan
    from skyrl_megatron_observe.estimate.memory_parameters import slot_bytes
    from tests.lora.adapter_ranks import pairs_of
    from tests.training.bodies import config

    assert pool.slots[0].engine.settings.adapters.slots == 4
    split = {"generator.inference_engine.tensor_parallel_size": 2}
    plan, pairs = Plan.of(json.loads((folder / "config.json").read_text())), pairs_of(folder, SEVERAL)
    expected = slot_bytes(config(folder, overrides=bodies.KEYS | SEVERAL | split), plan, pairs, 4)
    assert loop(pool.slots[0].engine._llm.collective_rpc("slot_bytes")) == [expected] * 2


def test_each_adapter_serves_under_its_name(pool, loop, trainer, folder, tmp_path):
    """Both travel first, then the one that was trained; the other keeps its version. What names none is refused."""
    from skyrl_megatron.errors import RequestError
    from skyrl_megatron.inference.client import InferenceClient

    expected = {}

    def adapt(name, seed):
        trainer.together("adapt", seed, name)
        trainer.together("export", tmp_path / f"{name}{seed}", name)
        expected[name] = reference_logprobs(tmp_path / f"{name}{seed}", TOKENS)

    client = InferenceClient(pool)
    (before,) = loop(client.generate([TOKENS[:20]], SAMPLING, adapters=["code"]))
    assert before.versions == [("initial", 0, 32)], "the base"
    sync = synchronizer(pool, trainer, folder, SEVERAL)
    adapt("math", 3), adapt("code", 4)
    report = loop(sync.sync("1"), 400)
    assert report.adapters == ("math", "code")
    assert report.logprob_diffs.keys() == {"engine 0, math", "engine 0, code"}
    both, alone = report.nbytes, {}
    for changed, version in (("code", "2"), ("math", "3"), (None, "4")):
        found = scores(pool, loop)
        assert all(largest_gap(found[name], expected[name]) <= EXACT for name in found)
        assert largest_gap(found["math"], found["code"]) > 100 * EXACT
        if changed is not None:
            adapt(changed, 4 + int(version))
        report = loop(sync.sync(version, {changed} - {None}), 400)
        assert report.adapters == ((changed,) if changed else ())
        alone[changed] = report.nbytes
    assert sync.plan is not None and alone["math"] + alone["code"] == both and alone[None] == 0
    assert alone["math"] == pytest.approx(alone["code"], rel=0.05), "buckets are filled up to whole pages"
    samples = loop(client.generate([TOKENS[:20]] * 2, SAMPLING, adapters=["math", "code"]))
    assert [sample.versions for sample in samples] == [[("3", 0, 32)], [("2", 0, 32)]]
    answers = loop(asked_over_http(client, ("math", "code", "policy")))
    assert [status for status, _ in answers] == [200, 200, 400] and "names no adapter" in answers[2][1]
    greedy = loop(client.generate([TOKENS[:20]] * 2, GREEDY, adapters=["math", "code"]))
    assert [ids for _, ids in answers[:2]] == [sample.token_ids for sample in greedy]
    for name, message in (("", "names no adapter: use math, code"), ("poetry", "'poetry' is unknown: use math, code")):
        with pytest.raises(RequestError, match=message):
            loop(client.sample(TOKENS[:20], SAMPLING, None, name))


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "fault, about, message",
    [
        ("activates nothing", "code", "with adapter code differ from the trainer's"),
        ("activates nothing", "math", "with adapter math differ from the trainer's"),
        ("takes one for the other", "", "differ from the trainer's"),
        ("fails to activate", "", "finish: .*out of slots, says the test"),
    ],
)
def test_after_a_failed_update_both_old_ones_serve(pool, loop, trainer, folder, fault, about, message):
    from skyrl_megatron.errors import WeightSyncError

    (slot,) = pool.slots

    def give(version, math, code):
        trainer.together("adapt", math, "math")
        trainer.together("adapt", code, "code")
        return loop(synchronizer(pool, trainer, folder, SEVERAL).sync(version), 400)

    give("good", 3, 4)
    old = scores(pool, loop)
    loop(slot.engine._llm.collective_rpc("plant", None, (fault, about)))
    with pytest.raises(WeightSyncError, match=message):
        give("bad", 11, 12)
    loop(slot.engine._llm.collective_rpc("plant", None, (None,)))
    assert pool.published == "good" and slot.state.value == "serving"
    found = scores(pool, loop)
    assert all(largest_gap(found[name], old[name]) <= EXACT for name in old)
    assert not give("good again", 5, 6).failures


@pytest.mark.full_matrix
def test_a_bucket_that_never_comes_leaves_the_engine_alive(pool, loop, trainer, folder):
    """Both workers of the engine wait in vain and say so; its next calls get answers of their own."""
    from skyrl_megatron.errors import WeightSyncError

    trainer.together("adapt", 3, "math")
    loop(synchronizer(pool, trainer, folder, SEVERAL).sync("before"), 400)
    engine, old = pool.slots[0].engine, scores(pool, loop)
    sync = synchronizer(pool, trainer, folder, SEVERAL, phase_s=8.0)

    async def nothing(*adapters):
        return []

    for handle in trainer.handles:
        handle.send_weights = nothing
    with pytest.raises(WeightSyncError, match=r"receive: .*trainer rank \d is gone or silent"):
        loop(sync.sync("never"), 400)
    for handle in trainer.handles:
        del handle.send_weights
    assert pool.slots[0].engine is engine and pool.slots[0].state.value == "serving"
    found = scores(pool, loop)
    assert all(largest_gap(found[name], old[name]) <= EXACT for name in old)
    report = loop(synchronizer(pool, trainer, folder, SEVERAL).sync("after"), 400)
    assert not report.failures
