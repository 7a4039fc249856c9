"""Connections of many sandboxes share the descriptors of the run's process: none of them can take those of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from types import SimpleNamespace

import pytest

WAIT_S = 20


def sandbox(name):
    """What a relay uses of a sandbox: its name and its listening socket."""
    return SimpleNamespace(name=name, listener=socket.create_server(("127.0.0.1", 0), backlog=128))


@contextlib.asynccontextmanager
async def relayed(*counts):
    """Relays with so many connections at most, and a server that answers a line with the same line."""
    from skyrl_megatron_agents.sandboxes.relay import Relay

    async def echo(reader, writer):
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with contextlib.AsyncExitStack() as stack:
        address = server.sockets[0].getsockname()
        relays = [Relay(sandbox(str(number)), *address, at_once=count) for number, count in enumerate(counts)]
        for relay in relays:
            await stack.enter_async_context(relay)
        yield relays
    server.close()


def held(relay, count):
    """Connections that their program holds and does not use."""
    host, port = relay.url.removeprefix("http://").split(":")
    return [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(count)]


async def said(relay):
    """Send a line over a new connection, and return what comes back."""
    reader, writer = await asyncio.open_connection(*relay.url.removeprefix("http://").split(":"))
    writer.write(b"hello\n")
    async with asyncio.timeout(WAIT_S):
        line = await reader.readline()
    writer.close()
    return line


def test_connections_without_a_place_take_no_descriptor():
    """A program holds 60 of its 4 connections. Others wait, and get the places that become free."""

    async def body():
        async with relayed(4, 4) as (relay, other):
            before = len(os.listdir("/proc/self/fd"))
            mine = held(relay, 60)
            assert await said(other) == b"hello\n"
            taken = len(os.listdir("/proc/self/fd")) - before - len(mine)
            assert taken <= 4 * 3 + 4, f"{taken} descriptors for 4 connections and one that is about to end"
            waiting = asyncio.create_task(said(relay))
            await asyncio.sleep(0)
            for each in mine:
                each.close()
            assert await waiting == b"hello\n"

    asyncio.run(body())


def test_all_relays_together_are_bounded(monkeypatch):
    """When no place is left, the relay that has most of them loses the connection that is silent longest."""
    from skyrl_megatron_agents.sandboxes.relay import Relay

    monkeypatch.setattr(Relay, "together", staticmethod(lambda: 8))

    async def body():
        async with relayed(64, 64, 64) as (relay, second, third):
            mine = held(relay, 30)
            for other in (second, third):
                assert [await said(other) for _ in range(5)] == [b"hello\n"] * 5
            assert sum(len(each._open) for each in (relay, second, third)) <= 8
            for each in mine:
                each.close()

    asyncio.run(body())


@pytest.mark.parametrize("error", ["EMFILE", "ECONNABORTED"])
def test_accepting_goes_on_after_an_error_of_the_system(monkeypatch, error, caplog):
    """The system's own errors cannot be made to order without taking the descriptors of the test's process."""
    import errno

    from skyrl_megatron_agents.sandboxes import relay as module

    monkeypatch.setattr(module, "RETRY_S", 0.01)

    async def body():
        loop = asyncio.get_running_loop()
        accept, left = loop.sock_accept, [1, 1, 1]

        async def failing(listener):
            if left:
                left.pop()
                raise OSError(getattr(errno, error), "planted")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", failing)
        async with relayed(2) as (relay,):
            assert [await said(relay) for _ in range(4)] == [b"hello\n"] * 4
        assert not left

    asyncio.run(body())
    assert not caplog.records
