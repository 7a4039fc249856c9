"""The HTTP endpoint of a run over real engines: OpenAI's package, tokens in and out, and what it refuses."""

from __future__ import annotations

import pytest

from tests.support.engines import VOCABULARY, largest_gap, tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]
PROMPT = [(7 * j + j * j) % 380 + 5 for j in range(8)]


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop


@pytest.fixture(scope="module")
def pool(engines, tiny_moe):
    with engines.pool(tiny_settings(tiny_moe["A"]), wait_s=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def endpoint(pool, loop, tmp_path_factory):
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron_agents.http_endpoint import HttpServer, build_app, endpoint_token

    path = tmp_path_factory.mktemp("token") / "token"
    token = endpoint_token(path)
    assert path.stat().st_mode & 0o777 == 0o600 and endpoint_token(path) == token

    async def serve():
        server = HttpServer(build_app(InferenceClient(pool), "policy", token, max_body_bytes=20_000), "127.0.0.1", 0)
        await server.start()
        return server

    server = loop(serve())
    yield server.url, token
    loop(server.stop())


def test_the_openai_package_talks_to_the_endpoint(endpoint):
    import openai

    url, token = endpoint
    talk = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=120)
    completion = talk.completions.create(model="policy", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=1)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    chat = talk.chat.completions.create(model="policy", messages=messages, max_tokens=6, temperature=0)
    stream = talk.chat.completions.create(model="policy", messages=messages, max_tokens=6, temperature=0, stream=True)
    pieces = [piece.choices[0].delta.content or "" for piece in stream if piece.choices]
    assert len(completion.choices[0].logprobs.token_logprobs) == 4
    assert chat.usage.completion_tokens == 6
    assert "".join(pieces) == chat.choices[0].message.content and len(pieces) > 2
    assert [entry.id for entry in talk.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="unknown model 'another': use one of policy"):
        talk.completions.create(model="another", prompt="x", max_tokens=1)


def test_tokens_in_tokens_out(endpoint, pool, loop):
    import httpx

    url, token = endpoint
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "temperature": 0}}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers={"Authorization": f"Bearer {token}"})
    choice = answer.json()["choices"][0]
    direct = loop(pool.slots[0].engine.generate("direct", PROMPT, body["sampling_params"]))
    assert choice["token_ids"] == direct.token_ids and choice["finish_reason"] == "length"
    assert largest_gap([entry["logprob"] for entry in choice["logprobs"]["content"]], direct.logprobs) <= 1e-5
    assert choice["weight_versions"] == [{"version": "initial", "start": 0, "end": 5}]
    assert answer.headers["x-policy-version"] == "initial"
    limit = pool.slots[0].engine.settings.max_model_len
    body = {"token_ids": (PROMPT * limit)[: limit - 20], "sampling_params": {"ignore_eos": True}}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers={"Authorization": f"Bearer {token}"})
    choice = answer.json()["choices"][0]
    assert len(choice["token_ids"]) == 20 and choice["finish_reason"] == "length"  # the context, not 16 tokens


def test_the_endpoint_refuses(endpoint):
    import httpx

    from skyrl_megatron.errors import LaunchError
    from skyrl_megatron_agents.http_endpoint import HttpServer

    url, token = endpoint
    right = {"Authorization": f"Bearer {token}"}

    def status(path, headers, **content):
        answer = httpx.post(url + path, headers=headers, **content)
        return answer.status_code, answer.json()["error"]["message"]

    path = "/inference/v1/generate"
    assert status(path, {"Authorization": "Bearer wrong"}, json={})[0] == 401
    assert status("/v1/chat/completions", {}, json={})[0] == 401
    assert status(path, right, content=b"x" * 30_000)[0] == 413
    assert status(path, right, content=(b"x" * 1000 for _ in range(30)))[0] == 413  # chunked: no length told
    assert status(path, right, json={"token_ids": [VOCABULARY + 3]})[0] == 400
    assert status(path, right, json={"token_ids": "abc"})[0] == 400
    assert status(path, right, content=b"{")[0] == 400
    assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(LaunchError, match=f"http_endpoint_port={url.rsplit(':')[-1]}: cannot listen"):
        HttpServer(None, "127.0.0.1", int(url.rsplit(":")[-1]))
