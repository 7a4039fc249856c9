"""HTTP servers of the standard library in a thread of a test."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.01
"""``shutdown()`` waits until the server next polls, by default half a second at the end of each test with a server."""


def start(server: socketserver.BaseServer) -> threading.Thread:
    """Serve in a thread until ``server.shutdown()``."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    return thread


@contextmanager
def serving[Server: socketserver.BaseServer](server: Server) -> Iterator[Server]:
    """Serve during the block, and close the server."""
    with server:
        thread = start(server)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
