"""What is before every HTTP application of ours: a bearer token, bounds on a request's body, its JSON, and the types
of what it samples with."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import ENGINE_KEY
from skyrl_megatron.inference.request_types import WrongType, check_body

MAX_BODY_BYTES = 16 << 20
MAX_ENGINE_BODY_BYTES = 1 << 30
"""The metadata of a model of a million tensors are below it."""
BODY_S, ENGINE_BODY_S = 60.0, 600.0
"""For all of a body to arrive."""


def refusal(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Make an answer that says why a request is refused, in OpenAI's form. ``param``: the field that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(content, status, headers)


def _unread(status: int, message: str) -> JSONResponse:
    """Make a refusal of a request whose body is not read, nor what the connection has after it."""
    return refusal(status, message, headers={"connection": "close"})


def guarded(token: str, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Make an application without routes behind a :class:`Guard`; an error in one of them is answered as a refusal is,
    without its text, and is logged."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, max_body_bytes=max_body_bytes)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refusal(500, f"{request.url.path}: {type(error).__name__}, see the log of the run")

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return refusal(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
        )

    app.add_exception_handler(Exception, failed)
    app.add_exception_handler(HTTPException, unknown)
    return app


async def json_of(request: Request) -> Any:
    """Return what a request's body holds. Raises RequestError for one that is no JSON, or nested deeper than it can be
    read."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{request.url.path}: the body is no JSON: {error}") from error


class Guard:
    """Token, size, time and types of a request, before anything else reads it. ``GET /health`` without a body needs no
    token; who has none never has a body read."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        token: str,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_s: float = BODY_S,
    ) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()
        self.max_body_bytes, self.body_s = max_body_bytes, body_s

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        known = secrets.compare_digest(headers.get(b"authorization", b""), self.expected)
        if not known and not _is_open(scope, headers):
            return await _unread(401, "wrong or missing bearer token")(scope, receive, send)
        too_large = f"the body is larger than {self.max_body_bytes} bytes"
        try:
            if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
                return await _unread(413, too_large)(scope, receive, send)
        except ValueError:
            return await _unread(400, "content-length is not a number")(scope, receive, send)
        body = bytearray()  # a chunked body does not say how long it is
        more = True
        try:
            async with asyncio.timeout(self.body_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.max_body_bytes:
                        return await _unread(413, too_large)(scope, receive, send)
        except TimeoutError:
            too_slow = f"the body did not arrive within {self.body_s:g} s"
            return await _unread(408, too_slow)(scope, receive, send)
        try:
            check_body(scope["path"], bytes(body))
        except WrongType as error:
            return await refusal(400, _printable(str(error)), _printable(error.path))(scope, receive, send)
        await self.app(scope, _replayed(bytes(body), receive), send)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _is_open(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request needs no token."""
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return scope["path"] == "/health" and scope["method"] in ("GET", "HEAD") and not has_body


class EngineGuard(Guard):
    """The guard of a vLLM server, whose endpoints for weights and workers would answer everybody. vLLM makes it
    (``--middleware``) with the application alone, so that the token comes from the environment."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app, os.environ[ENGINE_KEY], MAX_ENGINE_BODY_BYTES, ENGINE_BODY_S)


def _replayed(body: bytes, receive: Callable[..., Any]) -> Callable[..., Any]:
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pending.pop() if pending else await receive()

    return again
