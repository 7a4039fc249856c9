"""Limits of the small HTTP servers of the standard library, which give a thread to everybody who connects."""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import threading
from typing import Any

CONNECTIONS = 64
"""Open at a time; one more, and the oldest is closed."""
CONNECTION_S = 30.0
"""Longest life of a connection, which has one request."""


class LimitedThreads(socketserver.ThreadingMixIn):
    """Mix-in of a TCP server: a bound on connections and on the life of each."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, threading.Timer] = {}
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= CONNECTIONS:
            with contextlib.suppress(StopIteration, RuntimeError):  # the last of them ends in its thread
                _shut(next(iter(self._open)))
        self._open[request] = threading.Timer(CONNECTION_S, _shut, (request,))
        self._open[request].daemon = True
        self._open[request].start()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called once for each, whatever became of it."""
        if timer := self._open.pop(request, None):
            timer.cancel()
        super().shutdown_request(request)  # type: ignore[misc]


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A handler that logs nothing, not even who leaves early or sends nothing."""

    timeout = 10

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests come every two seconds."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
