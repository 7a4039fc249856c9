"""Calling an ASGI application in this process: an engine's OpenAI server without a port of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl_megatron.inference.protocol import OpenAIAnswer

LEAVE_S = 10.0
"""How long an application may take to notice that its client is gone."""


async def call_app(app: Any, path: str, body: bytes) -> OpenAIAnswer:
    """POST a JSON ``body`` to ``path``: first (status, content type), then the response's body as it comes.

    Leaving the iterator early tells the application that its client is gone.
    """
    pieces: asyncio.Queue[tuple[int, str] | bytes | None] = asyncio.Queue()
    sent, gone = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            pieces.put_nowait((message["status"], headers.get(b"content-type", b"application/json").decode()))
        elif message["type"] == "http.response.body":
            if message.get("body"):
                pieces.put_nowait(message["body"])
            if not message.get("more_body"):
                pieces.put_nowait(None)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
    call = asyncio.create_task(app(scope, receive, send))
    call.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await call
    finally:
        gone.set()
        if not call.done():  # it ends what it has begun; cancelled, vLLM's routes would leave that running
            asyncio.get_running_loop().call_later(LEAVE_S, call.cancel)
