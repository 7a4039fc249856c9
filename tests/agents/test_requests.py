"""What clients get wrong, over every route of a run's endpoint and of an engine's own server: one clear refusal each,
and the engine still serves. One engine, whose folder has sampling defaults that no request may take on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal

import pytest

from tests.inference import request_bodies as bodies
from tests.support.engines import tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.engines("requests")]
KEY, PROMPT = "a key", [5, 6]
TOKENS, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
FURTHER_END = 77
"""An end of sequence that the folder's ``generation_config.json`` has and its tokenizer does not."""
ANSWER_S = 50.0
"""For a short request; a quiet machine needs less than a tenth of it."""


@pytest.fixture(scope="module")
def model(tiny_moe, tmp_path_factory):
    folder = shutil.copytree(tiny_moe["A"], tmp_path_factory.mktemp("defaults") / "model")
    config = json.loads((folder / "config.json").read_text())
    ends = [config["eos_token_id"]] if isinstance(config.get("eos_token_id"), int) else []
    defaults = {"do_sample": True, "top_k": 1, "temperature": 0.3, "top_p": 0.1, "repetition_penalty": 1.9}
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": [*ends, FURTHER_END]}))
    return folder


@pytest.fixture(scope="module")
def pool(engines, model):
    with engines.pool(tiny_settings(model), wait_s=580) as pool:
        yield pool


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop


@pytest.fixture(scope="module")
def served(loop):
    """Servers by name, and the engine that they are of."""
    found = {}
    yield found
    for server in found.get("servers", {}).values():
        loop(server.stop())


@pytest.fixture
def urls(pool, loop, served):
    """Address of a run's endpoint, and of vLLM's own server over the same engine as ``serve_engine`` guards it; new
    ones for an engine that took the place of another."""
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron_agents.http_endpoint import EngineGuard, HttpServer, build_app

    async def serve(engine):
        os.environ["VLLM_API_KEY"] = KEY
        own = EngineGuard(await server_app(engine))
        del os.environ["VLLM_API_KEY"]
        apps = {"run": build_app(InferenceClient(pool), "policy", KEY), "server": own}
        servers = {name: HttpServer(app, "127.0.0.1", 0) for name, app in apps.items()}
        for server in servers.values():
            await server.start()
        return servers

    engine = pool.slots[0].engine
    if served.get("engine") is not engine:
        for server in served.get("servers", {}).values():
            loop(server.stop())
        served |= {"engine": engine, "servers": loop(serve(engine))}
    return {name: server.url for name, server in served["servers"].items()}


async def server_app(engine):
    """vLLM's application with all of the routes that servers of a fleet have."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model = str(engine.settings.folder)
    arguments = ["--model", model, "--served-model-name", "policy", "--enable-scale-out"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    tasks = await engine._llm.get_supported_tasks()
    app = build_app(args, tasks, engine._llm.model_config)
    await init_app_state(engine._llm, app.state, args, tasks)
    return app


def body_for(path, sampling):
    """A body of a route with these sampling parameters."""
    if path == TOKENS:
        return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2} | sampling}
    if path == COMPLETIONS:
        return {"model": "policy", "prompt": PROMPT, "max_tokens": 2} | sampling
    return {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | sampling


def ask(url, path, body):
    """(status, answer)."""
    import httpx

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(url + path, content=json.dumps(body), headers=headers, timeout=ANSWER_S)
    return answer.status_code, answer.json()


CASES = [
    (path, body_for(path, body), named) for path in (TOKENS, COMPLETIONS, CHAT) for body, named in bodies.SAMPLING
]
CASES += [(TOKENS, body_for(TOKENS, body), named) for body, named in bodies.TOKENS_SAMPLING]
CASES += [(TOKENS, body_for(TOKENS, {}) | body, named) for body, named in bodies.TOKENS]
CASES += [(COMPLETIONS, body_for(COMPLETIONS, {}) | body, named) for body, named in bodies.COMPLETIONS]


@pytest.mark.parametrize("server", ["run", "server"])
def test_each_body_is_answered_or_refused_by_its_field(urls, server):
    """As is a right request after each of them."""
    wrong = []
    for path, body, named in CASES:
        status, answer = ask(urls[server], path, body)
        refused = status == 400 and named is not None and named in answer["error"]["message"].replace('"', "")
        if not (refused or (status == 200 and named is None)):
            wrong.append((path, str(body)[:200], named, status, str(answer)[:300]))
        status, answer = ask(urls["run"], TOKENS, body_for(TOKENS, {}))
        assert status == 200, (path, str(body)[:200], status, answer)
    assert not wrong, "\n".join(map(str, wrong))


# ------------------------------------------------------------------ what a request leaves out
@pytest.mark.parametrize("server", ["run", "server"])
@pytest.mark.parametrize("path", [TOKENS, COMPLETIONS, CHAT])
def test_what_a_request_leaves_out_is_neutral(urls, server, path):
    """With the folder's own defaults all of these are one token; its ends of sequence hold."""
    firsts = set()
    for seed in range(12):
        status, answer = ask(urls[server], path, body_for(path, {"max_tokens": 1, "seed": seed, "ignore_eos": True}))
        assert status == 200, answer
        (choice,) = answer["choices"]
        firsts.add(str(choice.get("token_ids") or choice.get("text") or choice.get("message", {}).get("content")))
    assert len(firsts) > 3, firsts
    _, answer = ask(urls[server], path, body_for(path, {"max_tokens": 9, "allowed_token_ids": [FURTHER_END]}))
    assert answer["choices"][0]["finish_reason"] == "stop", answer


def test_a_rollout_is_sampled_without_the_folders_defaults(pool, loop):
    from skyrl_megatron.inference.client import InferenceClient

    sampling = [{"max_tokens": 1, "seed": seed, "ignore_eos": True} for seed in range(12)]
    samples = loop(InferenceClient(pool).generate([PROMPT] * 12, sampling), 300)
    assert len({sample.token_ids[0] for sample in samples}) > 3


# ------------------------------------------------------------------ clients that leave
@pytest.mark.parametrize("server", ["run", "server"])
@pytest.mark.parametrize("path", [TOKENS, COMPLETIONS, CHAT])
def test_a_client_that_leaves_ends_its_sampling(pool, loop, urls, server, path):
    """The engine is paused, so that nothing else ends it."""
    import httpx

    engine = pool.slots[0].engine

    async def until(count):
        async with asyncio.timeout(ANSWER_S):
            while engine._llm.get_num_unfinished_requests() != count:
                await asyncio.sleep(0.02)

    async def leave():
        await engine.pause("keep")
        try:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=ANSWER_S) as client:
                asked = asyncio.create_task(client.post(urls[server] + path, json=body_for(path, {"max_tokens": 400})))
                await until(1)
                asked.cancel()
            await until(0)
        finally:
            await engine.resume()

    loop(leave(), 200)


# ------------------------------------------------------------------ a stock client
def test_the_openai_package_gets_json_tools_and_its_model(pool, loop, urls):
    import dataclasses

    import openai

    talk = openai.OpenAI(base_url=f"{urls['run']}/v1", api_key=KEY, max_retries=0, timeout=ANSWER_S)
    assert talk.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="unknown model 'other': use one of policy"):
        talk.models.retrieve("other")
    for ask_for in (talk.completions.create, talk.chat.completions.create):
        asked = {"prompt": PROMPT} if ask_for == talk.completions.create else {"messages": []}
        with pytest.raises(openai.NotFoundError, match="unknown model 'other': use one of policy"):
            ask_for(model="other", max_tokens=1, **asked)
    messages = [{"role": "user", "content": "a"}]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    chat = talk.chat.completions.create(model="policy", messages=messages, max_tokens=60, response_format=wanted)
    assert chat.choices[0].message.content.lstrip().startswith("{"), chat
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    def with_tools():
        return talk.chat.completions.create(model="policy", messages=messages, max_tokens=4, tools=tools)

    with pytest.raises(openai.BadRequestError, match=r"requires generator\.inference_engine\.tool_call_parser"):
        with_tools()
    engine = pool.slots[0].engine
    settings = engine.settings
    try:
        engine.settings, engine._openai = dataclasses.replace(settings, tool_call_parser="hermes"), None
        assert with_tools().choices[0].finish_reason in ("length", "stop", "tool_calls")
    finally:
        engine.settings, engine._openai = settings, None


# ------------------------------------------------------------------ faults (last: they restart the engine)
@pytest.fixture
def unchecked(monkeypatch):
    """Requests are sent as they are: a fault that nothing real shows any more. A float for an int ends a core."""
    from skyrl_megatron.inference.vllm import admission, requests

    monkeypatch.setattr(admission, "require_types", lambda params: None)
    monkeypatch.setattr(admission, "require_decodable", lambda request: None)
    monkeypatch.setattr(requests, "typed_sampling", dict)


POISON = {"max_tokens": 2.0}


def test_a_core_that_is_busy_or_stopped_for_a_while_is_not_taken_for_dead(pool, loop):
    from skyrl_megatron.inference.vllm.admission import RECONNECT_S

    engine = pool.slots[0].engine
    core = engine.process_ids()[0]

    async def wait():
        os.kill(core, signal.SIGSTOP)
        work = asyncio.create_task(engine.generate("waits", PROMPT, {"max_tokens": 2}))
        await asyncio.sleep(2 * RECONNECT_S)
        assert not work.done()
        os.kill(core, signal.SIGCONT)
        return await work

    assert len(loop(wait(), 100).token_ids) == 2


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "dealt out"])
def test_a_request_that_ended_two_engines_is_refused_and_the_others_are_answered(pool, loop, unchecked, together):
    """The restarts of a run's defaults (3 within an hour) are not used up, and it ends no third engine."""
    from skyrl_megatron.errors import RequestError
    from skyrl_megatron.inference.client import HealthMonitor, InferenceClient

    (slot,) = pool.slots
    slot.restarts.clear()
    client = InferenceClient(pool, deterministic=together)
    others = {"max_tokens": 300, "temperature": 1.0, "ignore_eos": True}
    poison = POISON | {"top_k": 7 + together}

    async def work():
        monitor = HealthMonitor(pool, interval_s=0.2)
        monitor.start()
        try:
            beside = asyncio.create_task(client.generate([[9, at] for at in range(6)], others))
            async with asyncio.timeout(ANSWER_S):
                while not slot.in_flight:
                    await asyncio.sleep(0.01)
            with pytest.raises(RequestError, match=r"killed two engines.*2 tokens .*\[5, 6\].*'max_tokens': 2.0"):
                await client.sample(PROMPT, poison)
            samples = await beside
            async with asyncio.timeout(ANSWER_S):
                while len(slot.restarts) < 2 or slot.state.value != "serving":
                    await asyncio.sleep(0.01)
            ended = len(slot.restarts)
            with pytest.raises(RequestError, match="killed two engines"):
                await client.sample(PROMPT, poison)
            assert len(await client.generate([PROMPT], {"max_tokens": 2})) == 1
            return samples, ended
        finally:
            await monitor.stop()

    samples, ended = loop(work(), 1100)
    assert [len(sample.token_ids) for sample in samples] == [300] * 6
    assert ended == len(slot.restarts) == 2 and slot.state.value == "serving"
    assert "Expected `int" in slot.why or not slot.why
