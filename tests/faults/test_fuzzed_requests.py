"""Requests that nobody would send on purpose, to every route of every HTTP server of ours: each is answered, none by a
failure inside the server, and a right request after it is answered too. Engines' own part is
``tests/inference/test_engines.py``."""

import json
import socket

import pytest
from hypothesis import strategies as st

from tests.faults import fuzz
from tests.faults.fuzz import times
from tests.support.engines import LoopThread

pytestmark = pytest.mark.slow

wrong_requests = times(20, 200, same=True)
ANSWER_S = 50
"""Seconds until a right request is answered after a wrong one: the five of a quiet machine, ten times."""
TOKEN = "secret"
OFFER = {
    "url": "http://127.0.0.1:9",
    "model": {"model_type": "qwen3_moe", "hidden_size": 64},
    "versions": {"torch": "0", "vllm": "0"},
    "dtype": "float32",
    "workers": 1,
    "key": "k",
}
TOKENS = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "temperature": 0.5}, "model": "policy"}
PATHS = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def loop():
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture(scope="module")
def servers(loop, tmp_path_factory):
    """Address of each: registry and endpoint over a pool without engines, dashboard, numbers for Prometheus."""
    import threading

    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron_agents.http_endpoint import HttpServer, build_app
    from skyrl_megatron_observe.dashboard import DashboardServer
    from skyrl_megatron_observe.exporters import PrometheusEndpoint
    from skyrl_megatron_observe.run_report import RunReader
    from skyrl_megatron_tools.remote.fleet import EngineRequirements, Fleet
    from skyrl_megatron_tools.remote.registry import build_registry
    from tests.support.rank_pool import lasting_port

    async def serve():
        pool = EnginePool([], wait_s=0.01)
        fleet = Fleet(pool, EngineRequirements(OFFER["model"], "float32", 128, "policy"), silence_s=60.0, drain_s=0.1)
        apps = {
            "registry": build_registry(fleet, TOKEN),
            "endpoint": build_app(InferenceClient(pool), "policy", TOKEN),
        }
        made = {name: HttpServer(app, "127.0.0.1", 0) for name, app in apps.items()}
        for server in made.values():
            await server.start()
        return made

    run = tmp_path_factory.mktemp("run")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/avg_raw_reward": 0.5}\n')
    served = loop(serve())
    board = DashboardServer([RunReader(run)], token=TOKEN)
    thread = threading.Thread(target=board.serve_forever, daemon=True)
    thread.start()
    numbers = PrometheusEndpoint(lasting_port(), TOKEN)
    urls = {name: server.url for name, server in served.items()}
    yield urls | {"dashboard": board.url.partition("/?")[0], "prometheus": f"http://127.0.0.1:{numbers.port}"}
    numbers.finish()
    board.shutdown()
    board.server_close()
    for server in served.values():
        loop(server.stop())


RIGHT = {"registry": "/engines", "endpoint": "/v1/models", "dashboard": "/", "prometheus": "/metrics"}
"""Server → something that it answers with 200."""


def ask(url, method="GET", body=None, headers=None):
    """(status, text) of an answer."""
    import httpx

    own = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} if headers is None else headers
    answer = httpx.request(method, url, content=body, headers=own, timeout=ANSWER_S, verify=False)
    return answer.status_code, answer.text


def check_alive(servers, name):
    status, text = ask(servers[name] + RIGHT[name])
    assert status == 200, f"{name} no longer serves: {status} {text[:500]}"


@pytest.mark.parametrize("name", RIGHT)
def test_without_the_token_nothing_is_told(servers, name):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN[:-1]}, {"Authorization": b"\xff"}):
        assert ask(servers[name] + RIGHT[name], headers=headers)[0] == 401
    check_alive(servers, name)


def offers():
    """Bodies near to an offer of the versions that the run has."""
    from skyrl_megatron_tools.remote.fleet import package_versions

    return fuzz.bodies(OFFER | {"versions": package_versions()})


@pytest.mark.parametrize("path", ["/engines", "/engines/check"])
@wrong_requests
def test_the_registry_takes_any_body(servers, path, data):
    status, text = ask(servers["registry"] + path, "POST", data.draw(st.deferred(offers)))
    assert status in (400, 409, 201, 200), f"{status} {text[:300]}"
    check_alive(servers, "registry")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "GET"])
@wrong_requests
def test_the_registry_takes_any_name(servers, method, data):
    from urllib.parse import quote

    name = data.draw(st.text(min_size=1, max_size=20)).encode("utf-8", "replace")
    status, text = ask(f"{servers['registry']}/engines/{quote(name, safe='')}", method, data.draw(fuzz.bodies(OFFER)))
    assert status in (404, 405, 307), f"{status} {text[:300]}"
    check_alive(servers, "registry")


@pytest.mark.parametrize("path", PATHS)
@wrong_requests
def test_the_endpoint_takes_any_body(servers, path, data):
    """400 where the body is wrong, 404 where it names another model, 503 where it is right or only an engine could
    tell: there is none."""
    status, text = ask(servers["endpoint"] + path, "POST", data.draw(fuzz.bodies(TOKENS)))
    assert status in (400, 404, 503) and "error" in json.loads(text), f"{status} {text[:300]}"
    check_alive(servers, "endpoint")


QUERIES = st.dictionaries(
    st.sampled_from(["run", "step", "known", "x"]),
    st.one_of(st.text(max_size=20), st.integers(-5, 5).map(str), st.just("9" * 3000), st.just("1:1,1:1")),
)


def encoded(query):
    from urllib.parse import urlencode

    return urlencode({name: value.encode("utf-8", "replace") for name, value in query.items()})


@pytest.mark.parametrize("path", ["/data", "/samples", "/", "/../metrics.jsonl", "/samples/../../x"])
@wrong_requests
def test_the_dashboard_takes_any_query(servers, path, data):
    status, text = ask(f"{servers['dashboard']}{path}?{encoded(data.draw(QUERIES))}")
    assert status in (200, 400, 404), f"{status} {text[:300]}"
    assert "root:" not in text
    check_alive(servers, "dashboard")


READ = [("registry", "/health"), ("registry", "/engines"), ("endpoint", "/health"), ("endpoint", "/v1/models"),
        ("endpoint", "/v1/models/"), ("prometheus", "/metrics")]  # fmt: skip
"""Routes without a body, and one that names a model."""
NAMES = ["x-session-id", "Content-Type", "Accept", "Accept-Encoding", "Expect", "Connection", "Range", "X"]
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip)
HEADERS = st.dictionaries(st.sampled_from(NAMES), st.one_of(PRINTABLE, st.just("9" * 5000)), max_size=3)


@pytest.mark.parametrize("name, path", READ)
@wrong_requests
def test_a_route_takes_any_query_header_and_body(servers, name, path, data):
    """Of a route that reads none of them."""
    from urllib.parse import quote

    if path.endswith("/"):
        path += quote(data.draw(st.text(max_size=20)).encode("utf-8", "replace"))
    headers = {"Authorization": f"Bearer {TOKEN}"} | data.draw(HEADERS)
    body = data.draw(st.one_of(st.none(), st.binary(max_size=64), st.just(fuzz.DEEP)))
    status, text = ask(f"{servers[name]}{path}?{encoded(data.draw(QUERIES))}", "GET", body, headers)
    health = path == "/health" and status == 503  # there is no engine
    assert status < 500 or health, f"{status} {text[:300]}"
    check_alive(servers, name)


@pytest.mark.parametrize("name", RIGHT)
@wrong_requests
def test_bytes_that_are_no_request(servers, name, data):
    """Cut off, binary, or with headers that are none: the connection is answered or closed, the server stays."""
    host, port = servers[name].removeprefix("http://").split(":")
    head = b"POST /engines HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n" if data.draw(st.booleans()) else b""
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
        connection.sendall(head + data.draw(st.binary(max_size=200)))
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    check_alive(servers, name)
