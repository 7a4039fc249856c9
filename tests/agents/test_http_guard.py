"""What every HTTP application of ours answers before, and after, anything of its own."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading

import pytest


@pytest.mark.parametrize("token", ["token", "another"])
def test_an_error_in_a_route_is_answered_as_a_refusal(token):
    import httpx

    from skyrl_megatron_agents.http_endpoint import guarded_app

    app = guarded_app("token")

    @app.get("/engines")
    async def engines():
        raise ZeroDivisionError("a secret")

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.get("/engines", headers={"Authorization": f"Bearer {token}"})

    answer = asyncio.run(ask())
    assert answer.status_code == (500 if token == "token" else 401)
    said = answer.json()["error"]
    assert said["code"] == answer.status_code and "a secret" not in said["message"]
    assert ("ZeroDivisionError" in said["message"]) == (token == "token")


# ------------------------------------------------------------------ connections
@contextlib.contextmanager
def served():
    """A server with one route, in a thread; (its address, bodies that the route read)."""
    from fastapi import Request

    from skyrl_megatron_agents.http_endpoint import HttpServer, guarded_app

    app, read, ready, ended = guarded_app("token"), [], threading.Event(), threading.Event()

    @app.get("/health")
    async def health():
        return {}

    @app.post("/bodies")
    async def bodies(request: Request):
        read.append(len(await request.body()))
        return {}

    async def serve():
        server = HttpServer(app, "127.0.0.1", 0)
        addresses.append(server.url.removeprefix("http://").split(":"))
        await server.start()
        ready.set()
        await asyncio.to_thread(ended.wait)
        await server.stop()

    addresses = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield (addresses[0][0], int(addresses[0][1])), read
    finally:
        ended.set()
        thread.join()


def sent(address, text):
    """A connection with ``text`` sent."""
    connection = socket.create_connection(address, timeout=60)
    connection.sendall(text.encode())
    return connection


def answered(connection):
    """All that comes, until the other side closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


CHUNKED = "Host: run\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "head",
    [
        f"POST /health HTTP/1.1\r\n{CHUNKED}",
        f"GET /health HTTP/1.1\r\n{CHUNKED}",
        "GET /health HTTP/1.1\r\nHost: run\r\nContent-Length: 1000000\r\n",
        f"POST /bodies HTTP/1.1\r\n{CHUNKED}",
    ],
)
def test_without_a_token_no_body_is_read(head):
    """The connection is closed at once, with the body still to come."""
    with served() as (address, read):
        said = answered(sent(address, f"{head}\r\n"))
        assert said.startswith("HTTP/1.1 401") and "connection: close" in said
        assert not read
        health = "GET /health HTTP/1.1\r\nHost: run\r\nConnection: close\r\n\r\n"
        assert answered(sent(address, health)).startswith("HTTP/1.1 200")


@pytest.mark.process
def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch):
    from skyrl_megatron_agents import http_endpoint as http_guard

    monkeypatch.setattr(http_guard.Guard.__init__, "__defaults__", (http_guard.MAX_BODY_BYTES, 0.2))
    with served() as (address, read):
        head = f"POST /bodies HTTP/1.1\r\n{CHUNKED}Authorization: Bearer token\r\n\r\n"
        said = answered(sent(address, f"{head}1\r\na\r\n"))
        assert said.startswith("HTTP/1.1 408") and not read


@pytest.mark.process
@pytest.mark.parametrize("text", ["", "GET /health HTTP/1.1\r\nHost: run\r\n"], ids=["nothing", "half a head"])
def test_a_connection_without_a_request_is_closed(monkeypatch, text):
    from skyrl_megatron_agents import http_endpoint as http_limits

    monkeypatch.setattr(http_limits, "HEAD_S", 0.3)
    with served() as (address, _):
        assert answered(sent(address, text)) == ""
        # after an answer too
        whole = "GET /health HTTP/1.1\r\nHost: run\r\n\r\n"
        assert answered(sent(address, f"{whole}GET /hea")).startswith("HTTP/1.1 200")


@pytest.mark.process
def test_a_head_that_never_ends_is_refused():
    with served() as (address, _):
        assert answered(sent(address, f"GET /health HTTP/1.1\r\nHost: {'a' * (80 << 10)}")).startswith("HTTP/1.1 400")


@pytest.mark.process
def test_idle_connections_make_room_for_requests(monkeypatch):
    """More of them than there are descriptors would be: a request is answered, and most are closed."""
    from skyrl_megatron_agents import http_endpoint as http_limits
    from skyrl_megatron_agents import http_endpoint as http_server

    for module in (http_limits, http_server):
        monkeypatch.setattr(module, "connections_allowed", lambda: 20)
    with served() as (address, _), contextlib.ExitStack() as held:
        idle = [held.enter_context(sent(address, "")) for _ in range(200)]
        whole = "GET /health HTTP/1.1\r\nHost: run\r\nConnection: close\r\n\r\n"
        assert answered(sent(address, whole)).startswith("HTTP/1.1 200")
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b"", "the longest idle one was closed"


@pytest.mark.process
def test_the_bound_is_what_the_process_has_left():
    """In a process with sixty descriptors left."""
    script = """
import os, resource
open_ = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_ + 400,) * 2)
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(340)]
from skyrl_megatron_agents.http_endpoint import connections_allowed
print(connections_allowed())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert 16 <= int(done.stdout) <= 30, done.stderr


def test_a_route_that_is_not_there_is_refused_in_the_same_words():
    import httpx

    from skyrl_megatron_agents.http_endpoint import guarded_app

    async def ask():
        transport = httpx.ASGITransport(guarded_app("token"))
        async with httpx.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.get("/v1/nothing", headers={"Authorization": "Bearer token"})

    answer = asyncio.run(ask())
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "GET /v1/nothing: Not Found"


def test_an_answer_does_not_wait_for_an_acknowledgement():
    """Headers and body are two writes: with Nagle's algorithm the second one waits for 40 ms."""
    import socket

    from skyrl_megatron_agents.http_endpoint import listening_socket

    with listening_socket("127.0.0.1", 0, "port") as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
