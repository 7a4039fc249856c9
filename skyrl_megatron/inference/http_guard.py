"""What stands before every HTTP application of ours: a bearer token, a bound on a request's size, and its JSON."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import ENGINE_KEY

MAX_BODY_BYTES = 16 << 20
MAX_ENGINE_BODY_BYTES = 1 << 30
"""The metadata of a model of a million tensors are below it."""


def refusal(status: int, message: str) -> JSONResponse:
    """Make an answer that says why a request is refused, in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def guarded(token: str, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Make an application without routes behind a :class:`Guard`; an error in one of them is answered as a refusal is,
    without its text, and is logged."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, max_body_bytes=max_body_bytes)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refusal(500, f"{request.url.path}: {type(error).__name__}, see the log of the run")

    app.add_exception_handler(Exception, failed)
    return app


async def json_of(request: Request) -> Any:
    """Return what a request's body holds. Raises RequestError for one that is no JSON, or nested deeper than it can be
    read."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{request.url.path}: the body is no JSON: {error}") from error


class Guard:
    """Token and size of a request, before anything reads it. ``GET /health`` needs no token."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.app, self.expected, self.max_body_bytes = app, f"Bearer {token}".encode(), max_body_bytes

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if scope["path"] != "/health" and not secrets.compare_digest(
            headers.get(b"authorization", b""), self.expected
        ):
            return await refusal(401, "wrong or missing bearer token")(scope, receive, send)
        too_large = f"the body is larger than {self.max_body_bytes} bytes"
        try:
            if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
                return await refusal(413, too_large)(scope, receive, send)
        except ValueError:
            return await refusal(400, "content-length is not a number")(scope, receive, send)
        body = bytearray()  # a chunked body does not say how long it is
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body_bytes:
                return await refusal(413, too_large)(scope, receive, send)
        await self.app(scope, _replayed(bytes(body), receive), send)


class EngineGuard(Guard):
    """The guard of a vLLM server, whose endpoints for weights and workers would answer everybody. vLLM makes it
    (``--middleware``) with the application alone, so that the token comes from the environment."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app, os.environ[ENGINE_KEY], MAX_ENGINE_BODY_BYTES)


def _replayed(body: bytes, receive: Callable[..., Any]) -> Callable[..., Any]:
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pending.pop() if pending else await receive()

    return again
