"""Which key a run sends to an engine that it did not start, and whose addresses nobody serves."""

import asyncio
import http.server

import pytest

from tests.support.serving import serving

OWN = "the run's own key"


@pytest.fixture
def address(monkeypatch):
    """The URL of a server that is no engine, and the ``Authorization`` headers that it was sent."""
    monkeypatch.setenv("VLLM_API_KEY", OWN)
    sent = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            sent.append(self.headers.get("Authorization"))
            self.send_error(404)

        def log_message(self, *_):
            pass

    with serving(http.server.HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", sent


@pytest.mark.process
@pytest.mark.parametrize(("key", "expected"), [(None, None), ("", None), ("its own", "Bearer its own")])
def test_an_engine_that_joins_gets_the_key_that_it_gave(address, key, expected):
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron_tools.remote.fleet import EngineRequirements, Fleet, JoinRequest, package_versions

    url, sent = address

    async def join():
        fleet = Fleet(EnginePool([]), EngineRequirements({}, "float32", 1, "model"), silence_s=60, drain_s=60)
        body = {"url": url, "model": {}, "versions": package_versions(), "dtype": "float32", "workers": 1, "key": key}
        with pytest.raises(EngineError, match="no vLLM server"):
            await fleet.join(JoinRequest.of(body))

    asyncio.run(join())
    assert sent and set(sent) == {expected}


@pytest.mark.process
def test_a_server_of_the_configuration_gets_the_runs_key(address):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron.workers import engines

    url, sent = address
    key = "generator.inference_engine.external_server_urls"
    [make] = engines._elsewhere(SkyRLTrainConfig.from_cli_overrides([f"{key}=['{url}']"]))

    async def start():
        with pytest.raises(EngineError, match="no vLLM server"):
            await make().start()

    asyncio.run(start())
    assert sent and set(sent) == {f"Bearer {OWN}"}


def test_an_address_that_no_plugin_serves_is_named():
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.plugins import ENGINE_SERVICES, TEACHERS
    from skyrl_megatron.workers import engines

    cfg = SkyRLTrainConfig.from_cli_overrides(["generator.inference_engine.remote_urls=['grpc://a:1']"])
    known = r"inference_engine\.remote_urls=grpc: not registered; known: http, https"
    with pytest.raises(ConfigError, match=known):
        engines._elsewhere(cfg)
    with pytest.raises(ConfigError, match=r"trainer\.teacher\.models=s3: not registered; known: http, https"):
        TEACHERS.require("s3")
    with pytest.raises(ConfigError, match=r"not registered; known: enable_http_endpoint, enable_registry"):
        ENGINE_SERVICES.require("enable_clocks")
