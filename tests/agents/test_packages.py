"""Environments of other packages: our score of an answer is the package's own, and one error says what to install."""

import http.server
import importlib.util
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.serving import start

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-environments"


@pytest.mark.process
@pytest.mark.parametrize("name", ["reasoning_gym", "verifiers", "openenv", "nemo_gym", "harbor"])
def test_scores_are_those_of_the_package(tmp_path, name):
    if not (VENV / "installed.txt").is_file():
        pytest.skip("the packages are not installed: launch/requirements/environments.sh")
    python = VENV / {"nemo_gym": "nemo-gym", "harbor": "harbor"}.get(name, "texts") / "bin" / "python"
    done = subprocess.run(
        [python, Path(__file__).with_name("packages_run.py"), name, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0 and done.stdout.endswith("PASSED\n"), done.stderr


@pytest.mark.parametrize("id", ["reasoning-gym:maze", "verifiers:wordle", "openenv:http://127.0.0.1:1"])
def test_a_missing_package_is_one_error(id):
    from skyrl_megatron.envs import base_text_env as registry
    from skyrl_megatron.errors import DataError

    package = id.partition(":")[0]
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(DataError, match=f"need the package: .*pip install .*{package}$"):
        registry.require([id])


def test_ids_of_packages_have_a_name():
    from skyrl_megatron.envs import make, spec
    from skyrl_megatron.errors import DataError

    assert spec("nemo-gym:http://a:1").kwargs == {"name": "http://a:1"}
    for id in ("nemo-gym", "nemo-gym:", "no-such-package:x"):
        with pytest.raises(DataError, match=r"no environment|needs a name"):
            make(id)


def test_a_row_leads_only_where_the_configuration_says():
    """Neither to another server nor to another module; ``--check`` names it, and the servers that are asked."""
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config import SkyRLGymConfig, SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.envs import base_text_env as registry
    from skyrl_megatron.errors import DataError
    from skyrl_megatron_observe.preflight.data_checks import _environments

    url = "nemo-gym:http://127.0.0.1:9"
    assert registry.config_of("reasoning-gym:maze", SkyRLGymConfig()) == {}
    for id in (url, "openenv:http://a:1", "verifiers:os"):
        for call in (registry.config_of, lambda id, cfg: registry.require([id], cfg)):
            with pytest.raises(DataError, match=r"is not in environment.skyrl_gym.packages=\['reasoning-gym:\*'\]"):
                call(id, SkyRLGymConfig())
    listed = SkyRLGymConfig(packages=["nemo-gym:http://127.0.0.1:*"])
    registry.require([url], listed)
    with pytest.raises(DataError, match="is not in"):
        registry.require(["nemo-gym:http://127.0.0.2:9"], listed)
    cfg = SkyRLTrainConfig()
    run = PlannedRun(cfg, Hardware(0, 1))
    (problem,) = _environments(run, {url})
    assert problem.value == url and "environment.skyrl_gym.packages" in str(problem)
    cfg.environment.skyrl_gym.packages = [url]
    (told,) = _environments(run, {url})
    assert url in str(told) and "asks this server" in str(told)


class Verifier(http.server.BaseHTTPRequestHandler):
    """Answers as ``kind`` says."""

    protocol_version, kind = "HTTP/1.1", "right"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/seed_session":
            return self.whole(b"{}", [("set-cookie", "session=7")])
        assert self.headers["cookie"] == "session=7", "of one session"
        if self.kind in ("endless", "slow"):
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                while True:
                    part = b" " * (1 << 20 if self.kind == "endless" else 1)
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    time.sleep(0.0 if self.kind == "endless" else 0.05)
            except OSError:
                self.close_connection = True
                return None
        answers = {"right": b'{"reward": 0.5, "why": "x"}', "text": b'{"reward": "1"}', "list": b"[1]", "no": b"{"}
        return self.whole(answers[self.kind])

    def whole(self, body, headers=()):
        self.send_response(200)
        for name, value in (("content-length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_answers_of_a_server_are_bounded(monkeypatch):
    from skyrl_megatron.envs import make
    from skyrl_megatron_agents.environments.packages import nemo_gym

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Verifier)
    start(server)
    row = {"extra_info": {"row": json.dumps({"responses_create_params": {"input": "2 + 2"}})}}
    env = make(f"nemo-gym:http://127.0.0.1:{server.server_port}", extras=row)
    try:
        made = env.step("4")
        assert (made["reward"], made["metadata"]) == (0.5, {"why": "x"})
        monkeypatch.setattr(nemo_gym, "TIMEOUT_S", 20.0)
        for kind, error in (
            ("endless", "more than 16,777,216 bytes"),
            ("text", "number"),
            ("list", "number"),
            ("no", ""),
        ):
            monkeypatch.setattr(Verifier, "kind", kind)
            with pytest.raises(ValueError, match=error):
                env.step("4")
        monkeypatch.setattr(nemo_gym, "TIMEOUT_S", 0.5)
        monkeypatch.setattr(Verifier, "kind", "slow")
        with pytest.raises(TimeoutError):
            env.step("4")
    finally:
        server.shutdown()
        server.server_close()
