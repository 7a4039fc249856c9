"""The server: nothing without the token, on the loopback interface alone, and only what it is asked for."""

import json
import socket
import struct
import urllib.error
import urllib.request

import pytest

from tests.support.serving import serving


@pytest.fixture
def server(tmp_path):
    from skyrl_megatron_observe.dashboard import DashboardServer
    from skyrl_megatron_observe.run_report import RunReader

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.25}\n')
    with serving(DashboardServer([RunReader(tmp_path)])) as server:
        yield server


def get(server, path, token=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_address[1]}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    return urllib.request.urlopen(request, timeout=30)


@pytest.mark.parametrize(
    "path", ["/", "/data", "/samples?run=0&step=1", "/trajectories?run=0&step=1", "/?token=", "/?token=wrong"]
)
def test_nothing_is_told_without_the_token(server, path):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(server, path)
    assert error.value.code == 401 and b"0.25" not in error.value.read()


def test_what_is_new_is_given(server, tmp_path):
    with get(server, f"/?token={server.token}") as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.read().startswith(b"<!doctype html>")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a": 0.125}\n')
    with get(server, "/data?known=0:2", server.token) as answer:
        block = answer.read()
    [size] = struct.unpack_from("<I", block)
    [run] = json.loads(block[4 : 4 + size])["runs"]
    assert (run["after"], run["lines"], run["rows"], run["names"]) == (2, 3, 1, ["a", "step"])
    assert struct.unpack("<2f", block[4 + size :]) == (0.125, 3.0)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/samples?run=0&step=7", 404),
        ("/trajectories?run=0&step=7", 404),
        ("/samples?run=5&step=1", 400),
        ("/samples?run=0", 400),
        ("/../config.yaml", 404),
    ],
)
def test_what_is_not_there_is_refused(server, path, code):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(server, path, server.token)
    assert error.value.code == code


def test_idle_connections_end_and_make_room(server, monkeypatch):
    """More of them than there may be: a request is answered, the oldest are closed, and in time all are."""
    from skyrl_megatron_observe import local_server

    monkeypatch.setattr(local_server, "CONNECTIONS", 5)
    monkeypatch.setattr(local_server, "CONNECTION_S", 1.0)
    idle = [socket.create_connection(server.server_address, timeout=60) for _ in range(20)]
    try:
        with get(server, "/", server.token) as answer:
            assert answer.status == 200
        assert all(connection.recv(1) == b"" for connection in idle)
    finally:
        for connection in idle:
            connection.close()
