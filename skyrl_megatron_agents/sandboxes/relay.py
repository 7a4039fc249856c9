"""The way from a sandbox to one server of the run, for sandboxes that have no network.

A sandbox with :attr:`~skyrl_megatron_agents.sandboxes.sandbox.SandboxSpec.relay` has a socket that listens on its own
loopback interface. This process accepts on it, so each connection comes from that sandbox, and passes the bytes to one
address, for example that of the gateway. Nothing else is reachable, and the server needs no address outside this
machine.

A connection takes descriptors of this process, which all sandboxes share. So it is accepted only when there is a place
for it. Others wait in the queue of the sandbox's own socket, where they take nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, ClassVar

from skyrl_megatron.errors import SandboxError
from skyrl_megatron_agents.sandboxes.sandbox import Sandbox

CONNECT_S = 10.0
"""Time in seconds that the server has to accept a connection."""
CONNECTIONS = 64
"""Connections of one sandbox at once. An agent with parallel calls has a few."""
READ = 1 << 16
RETRY_S = 0.2
"""Time in seconds after which accepting is tried again where the system has no descriptor left."""


class _Connection:
    """A connection that was accepted."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.used = asyncio.get_running_loop().time()
        """When bytes last went through it."""


class Relay:
    """Passes connections from a sandbox to ``host:port`` as long as the block lasts.

    ``async with Relay(sandbox, host, port) as relay``: ``relay.url`` is the server's URL inside the sandbox. Raises
    SandboxError if the sandbox has no listener.

    ``at_once``: connections of this sandbox. All relays together have at most :meth:`together` ones; when these are
    taken, the relay with most of them loses the one that has been silent longest.
    """

    _relays: ClassVar[set[Relay]] = set()

    def __init__(self, sandbox: Sandbox, host: str, port: int, *, at_once: int = CONNECTIONS) -> None:
        if sandbox.listener is None:
            raise SandboxError(f"sandbox {sandbox.name} was started without a relay: set relay in its SandboxSpec")
        self._listener: socket.socket = sandbox.listener
        self._to = (host, port)
        self._places = asyncio.Semaphore(at_once)
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[_Connection, asyncio.Task[None]] = {}
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = 0
        """Number of connections that the server did not accept."""

    @staticmethod
    def together() -> int:
        """Return the connections that all relays of this process may have: each takes two descriptors here and one of
        the server, which may be in this process."""
        from skyrl_megatron_agents.http_endpoint import connections_allowed  # with the server's packages

        return connections_allowed() // 3

    async def __aenter__(self) -> Relay:
        """Start to accept."""
        self._listener.setblocking(False)
        Relay._relays.add(self)
        self._accepting = asyncio.create_task(self._accept(), name="relay of a sandbox")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the listener and all connections."""
        Relay._relays.discard(self)
        tasks = [task for task in (self._accepting, *self._open.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        """Accept connections while there are places for them."""
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor or memory is left, or the peer has gone
                self._places.release()
                await asyncio.sleep(RETRY_S)
                continue
            self._make_room()
            connection = _Connection()
            task = self._open[connection] = asyncio.create_task(self._pass_on(accepted, connection))
            task.add_done_callback(lambda _, closed=connection: self._closed(closed))  # type: ignore[misc]

    def _closed(self, connection: _Connection) -> None:
        if self._open.pop(connection, None) is not None:
            self._places.release()

    def _make_room(self) -> None:
        """End a connection if all relays have no place left."""
        if sum(len(relay._open) for relay in Relay._relays) < self.together():
            return
        most = max(Relay._relays, key=lambda relay: len(relay._open))
        if most._open:
            silent = min(most._open, key=lambda connection: connection.used)
            most._open[silent].cancel()
            most._closed(silent)

    async def _pass_on(self, accepted: socket.socket, connection: _Connection) -> None:
        """Copy the bytes of a connection in both directions until both ends, or an error of one, end it."""
        writers: list[asyncio.StreamWriter] = []
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(sock=accepted, limit=READ)
                    writers.append(writer)
                    there, to_there = await asyncio.open_connection(*self._to, limit=READ)
                    writers.append(to_there)
            except (OSError, TimeoutError):
                self.refused += 1
                return
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, to_there, connection))
                both.create_task(_copy(there, writer, connection))
            with contextlib.suppress(OSError):
                writer.close()  # after what is still to be sent
                writers.remove(writer)
        finally:
            for stream in writers:
                stream.transport.abort()
            if not writers:
                accepted.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, connection: _Connection) -> None:
    """Copy until the end of ``source``, and pass the end on. An error of either side ends the connection."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await source.read(READ):
            connection.used = loop.time()
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
