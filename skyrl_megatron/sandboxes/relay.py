"""The way from a sandbox to one server of the run, for sandboxes that have no network.

A sandbox with :attr:`~skyrl_megatron.sandboxes.sandbox.SandboxSpec.relay` has a socket that listens on its own
loopback interface. This process accepts on it, so each connection comes from that sandbox, and passes the bytes to one
address, for example that of the gateway. Nothing else is reachable, and the server needs no address outside this
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from skyrl_megatron.errors import SandboxError
from skyrl_megatron.sandboxes.sandbox import Sandbox

CONNECT_S = 10.0
"""Time in seconds that the server has to accept a connection."""
CONNECTIONS = 64
"""Connections of one sandbox at once; further ones wait. An agent with parallel calls has a few."""
READ = 1 << 16


class Relay:
    """Passes connections from a sandbox to ``host:port`` as long as the block lasts.

    ``async with Relay(sandbox, host, port) as relay``: ``relay.url`` is the server's URL inside the sandbox. Raises
    SandboxError if the sandbox has no listener.
    """

    def __init__(self, sandbox: Sandbox, host: str, port: int) -> None:
        if sandbox.listener is None:
            raise SandboxError(f"sandbox {sandbox.name} was started without a relay: set relay in its SandboxSpec")
        self._listener = sandbox.listener
        self._to = (host, port)
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[Any]] = set()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = 0
        """Number of connections that the server did not accept."""

    async def __aenter__(self) -> Relay:
        """Start to accept."""
        self._server = await asyncio.start_server(self._pass_on, sock=self._listener, limit=READ)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with self._places:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        there, to_there = await asyncio.open_connection(*self._to, limit=READ)
                except (OSError, TimeoutError):
                    self.refused += 1
                    return
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(_copy(reader, to_there))
                        both.create_task(_copy(there, writer))
                finally:
                    to_there.transport.abort()
        finally:
            self._open.discard(task)
            with contextlib.suppress(OSError):
                writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the end of ``source``, and pass the end on. An error of either side ends the connection."""
    with contextlib.suppress(OSError):
        while data := await source.read(READ):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
