"""What dashboard and Prometheus endpoint share as HTTP servers.

They listen on the loopback interface alone, and clients that keep connections open neither use up threads nor shut
others out.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import threading
from typing import Any

HOST = "127.0.0.1"
CONNECTIONS = 64
"""Maximum number of open connections. One more closes the oldest."""
CONNECTION_S = 30.0
"""Maximum duration of a connection, which serves one request."""


class LimitedThreads(socketserver.ThreadingMixIn):
    """Mix-in of a TCP server that limits the number of connections and the duration of each."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, threading.Timer] = {}
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= CONNECTIONS:
            # the last connection may end in its thread at the same time
            with contextlib.suppress(StopIteration, RuntimeError):
                _shut(next(iter(self._open)))
        self._open[request] = threading.Timer(CONNECTION_S, _shut, (request,))
        self._open[request].daemon = True
        self._open[request].start()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Called once for each connection, also after errors."""
        if timer := self._open.pop(request, None):
            timer.cancel()
        super().shutdown_request(request)  # type: ignore[misc]


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A handler that logs nothing, not even clients that disconnect early or send nothing."""

    timeout = 10

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests come every two seconds."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
