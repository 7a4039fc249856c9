"""Limits of every HTTP server of ours on those who connect: how long a head may take, and how many may be there.

uvicorn has one for idle connections after a request (``timeout_keep_alive``) and for the size of a head
(``h11_max_incomplete_event_size``); a connection that sends nothing, or a head byte by byte, it keeps for ever.
"""

from __future__ import annotations

import asyncio
import os
import resource
from functools import cache

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""From a connection, or the end of the answer before, to the last byte of a request's head."""
MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS, MIN_CONNECTIONS = 8192, 16


@cache
def connections_allowed() -> int:
    """Return how many connections this process keeps at a time: half of the file descriptors that it has left when it
    is first asked, so that its files and its own connections have the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - len(os.listdir("/proc/self/fd"))
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, left // 2))


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, for ``uvicorn.Config(http=…)``. A connection without a request is closed after ``HEAD_S``;
    the one that has waited longest makes room for another above :func:`connections_allowed`."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > connections_allowed():
            waiting = (each for each in self.connections if isinstance(each, LimitedProtocol) and each._due)
            longest = min(waiting, key=lambda each: each._due.when())  # type: ignore[union-attr]
            longest.connections.discard(longest)
            longest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop_waiting()
        self._due = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
