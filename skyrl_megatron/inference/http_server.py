"""Serving the endpoint: on loopback unless told otherwise, with a token that only the user can read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.inference.http_limits import MAX_HEAD_BYTES, LimitedProtocol, connections_allowed

ENDPOINT_PORT = "generator.inference_engine.http_endpoint_port"
BACKLOG = 2048


class HttpServer:
    """An application served on the running event loop, beside whatever else runs there.

    ``port`` 0 takes a free one; ``key`` is the setting that names it. Raises LaunchError when the address cannot be
    had.
    """

    def __init__(self, app: Any, host: str, port: int, key: str = ENDPOINT_PORT) -> None:
        self._socket = bound(host, port, key)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            backlog=min(BACKLOG, connections_allowed()),  # asyncio accepts as many before it looks at one of them
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve; returns once connections are taken."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http endpoint")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise LaunchError(f"the endpoint on {self.url} did not start")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Take no more connections, let the open ones end, close the port."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the run's, not the endpoint's


def bound(host: str, port: int, key: str) -> socket.socket:
    """Return a listening socket. Raises LaunchError naming ``key``, the setting or option of the port."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise LaunchError(
            f"{key}={port}: cannot listen on {host}: {error.strerror}; set another port, or 0 for a free one"
        ) from error


def endpoint_token(path: Path, key: str = "http_token_path") -> str:
    """Return the token in a file that only its owner can read (mode 0600), made there if there is none.

    Raises LaunchError naming ``key`` when the file is readable by others, empty, or cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise LaunchError(f"{key}={path}: others can read it: chmod 600 {path}")
        token = path.read_text().strip()
    except OSError as error:
        raise LaunchError(f"{key}={path}: {error.strerror}") from error
    if not token:
        raise LaunchError(f"{key}={path}: the file is empty: delete it, or write a token into it")
    return token
