"""Every socket that a run listens on: where it can be reached from, and that it tells nothing without a token."""

import json
import time

import psutil
import pytest

from tests.job import runs

pytestmark = pytest.mark.vllm

WAITS = """
import json, time
from pathlib import Path
def train_critic_and_policy(self, batch):
    folder = Path(self.cfg.trainer.ckpt_path).parent
    services = self.inference_engine_client.services
    endpoints = {"endpoint": services["enable_http_endpoint"].url, "registry": services["enable_registry"].url}
    (folder / "urls.tmp").write_text(json.dumps(endpoints))
    (folder / "urls.tmp").rename(folder / "urls.json")
    end = time.monotonic() + 200
    while not (folder / "seen").exists() and time.monotonic() < end:
        time.sleep(0.1)
    RayPPOTrainer.train_critic_and_policy(self, batch)
Trainer.train_critic_and_policy = train_critic_and_policy
"""
"""The run stands still in its first step until it was looked at."""

WITHOUT_TOKEN = {
    "raylet": "Ray: gRPC with the run's token",
    "gcs_server": "Ray: gRPC with the run's token",
    "python": "Ray's driver, workers, agents (the token); torch.distributed's stores and pairs (a private network)",
}
"""Who listens, other than our HTTP servers, and how it is kept from others; loopback keeps other machines out."""


def listening(process):
    """(address, port, pid, name) of every TCP socket that a process or one below it listens on."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        try:
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((connection.laddr.ip, connection.laddr.port, each.pid, each.name()))
        except psutil.NoSuchProcess:
            continue
    return found


def asked(url, token=None):
    import httpx

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers, timeout=30).status_code


@pytest.mark.full_matrix
def test_sockets_of_a_run(tmp_path):
    from tests.support.rank_pool import lasting_port

    folder, port = runs.prepare(tmp_path), lasting_port()
    engine = "generator__inference_engine__"
    keys = {"enable_http_endpoint": "true", "http_endpoint_port": 0, "served_model_name": "policy"}
    keys |= {"enable_registry": "true", "registry_port": 0}
    process = runs.start(
        folder,
        WAITS,
        trainer__max_training_steps=1,
        trainer__prometheus_port=port,
        **{engine + key: value for key, value in keys.items()},
    )
    try:
        end = time.monotonic() + runs.TIMEOUT_S
        while not (folder / "urls.json").exists():
            assert process.poll() is None and time.monotonic() < end, process.communicate()[1][-4000:]
            time.sleep(0.2)
        found = listening(psutil.Process(process.pid))
        urls = json.loads((folder / "urls.json").read_text())
        log = folder / "logs/skyrl/run"
        served = {
            "endpoint": (urls["endpoint"], "/v1/models", log / "http_token"),
            "registry": (urls["registry"], "/engines", log / "registry_token"),
            "prometheus": (f"http://127.0.0.1:{port}", "/metrics", log / "prometheus_token"),
        }
        for name, (url, path, token) in served.items():
            assert token.stat().st_mode & 0o077 == 0, f"others can read {token}"
            assert [asked(url + path), asked(url + path, "wrong")] == [401, 401], name
            assert asked(url + path, token.read_text().strip()) == 200, name
        (folder / "seen").touch()
        done = runs.finish(process, folder)
    finally:
        process.kill()
    done.check()
    open_to_others = [socket for socket in found if socket[0].removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
    assert not open_to_others, f"reached from other machines: {open_to_others}"
    ours = {int(url.rsplit(":")[-1]) for url, _, _ in served.values()}
    assert ours <= {socket[1] for socket in found}
    unknown = [socket for socket in found if socket[1] not in ours and not known(socket[3])]
    assert not unknown, f"nobody says how these are kept from others: {unknown}"


def known(name):
    return any(
        name.startswith(each) or (each == "python" and name.startswith(("ray", "VLLM"))) for each in WITHOUT_TOKEN
    )
