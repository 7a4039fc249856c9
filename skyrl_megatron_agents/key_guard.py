"""The gateway as an ASGI application: it checks keys, sizes and times of requests before anything of them is read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from skyrl_megatron_agents.answers import COMPLETIONS, error_content
from skyrl_megatron_agents.http_endpoint import MAX_BODY_BYTES, Guard

SAMPLING_PATHS = ("/v1/chat/completions", COMPLETIONS, "/v1/messages", "/v1/responses")
COUNT_TOKENS = "/v1/messages/count_tokens"
RETRY_HEADER = b"x-stainless-retry-count"
"""Header in which the libraries of OpenAI and Anthropic count their retries."""
BODIES = 4
"""Largest bodies that a trajectory may have unanswered at once."""


class _TooManyBytes(Exception):
    """The requests of a trajectory that are not answered hold too much memory."""


class KeyGuard(Guard):
    """Checks keys, sizes and times of requests, and passes the others to the gateway. An ASGI application."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        super().__init__(self._serve, "", gateway.bounds.body_bytes)

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Serve a request within the limits of its trajectory."""
        name, _ = _parts(scope.get("path", ""))
        trajectory = self.gateway.trajectories.get(name)
        if scope["type"] != "http" or trajectory is None or not self._has_key(name, dict(scope["headers"])):
            return await super().__call__(scope, receive, send)
        if trajectory.requests >= trajectory.limits.connections:
            busy = f"the agent has {trajectory.requests} requests at once, as many as generator.agent.max_connections"
            return await self.refusal(scope, 429, busy, unread=True)(scope, receive, send)
        held = 0

        async def counted() -> Any:
            nonlocal held
            message = await receive()
            held += len(message.get("body", b""))
            trajectory.held += len(message.get("body", b""))
            if trajectory.held > BODIES * self.max_body_bytes:
                raise _TooManyBytes
            return message

        trajectory.requests += 1
        try:
            await trajectory.wait_for_pace(_length(scope["headers"]))
            await super().__call__(scope, counted, send)
        except _TooManyBytes:
            much = f"the unanswered requests of the agent have more than {BODIES * self.max_body_bytes} bytes"
            await self.refusal(scope, 429, much, unread=True)(scope, receive, send)
        finally:
            trajectory.requests -= 1
            trajectory.held -= held

    def refused(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return None
        name, _ = _parts(scope["path"])
        if self._has_key(name, headers):
            trajectory = self.gateway.trajectories.get(name)
            if trajectory is not None and not trajectory.closed:
                return None
            self.gateway.counts.now["refused"] += 1
            return 404, f"trajectory {name} has not begun, or has ended"
        self.gateway.counts.now.update(("refused", "unattributed"))
        if not (key := _key_in(headers)):
            return 401, "the key is missing: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        if self.gateway.is_key(key):
            return 403, "the key belongs to another trajectory"
        return 401, "the key is wrong"

    def _has_key(self, name: str, headers: Mapping[bytes, bytes]) -> bool:
        return hmac.compare_digest(_key_in(headers), self.gateway.key_of(name).encode())

    def refusal(
        self, scope: Mapping[str, Any], status: int, message: str, param: str | None = None, *, unread: bool = False
    ) -> Response:
        name, path = _parts(scope["path"])
        code = None
        if status == 413 and (trajectory := self.gateway.trajectories.get(name)) is not None:
            trajectory.too_long, code = message, "context_length_exceeded"
        content = error_content(path, status, message, param=param, code=code)
        return JSONResponse(content, status, {"connection": "close"} if unread else None)

    async def _serve(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        name, path = _parts(scope["path"])
        if scope["path"] == "/health":
            return await JSONResponse({"trajectories": len(self.gateway.trajectories)})(scope, receive, send)
        trajectory = self.gateway.trajectories[name]
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["method"] != "POST" or path not in (*SAMPLING_PATHS, COUNT_TOKENS):
            return await self._other(scope, path)(scope, receive, send)
        if path == COUNT_TOKENS:
            status, content_type, content = await self.gateway.count_tokens(trajectory, bytes(body))
            return await Response(content, status, media_type=content_type)(scope, receive, send)
        retry = dict(scope["headers"]).get(RETRY_HEADER, b"0") not in (b"", b"0")
        answer = await self.gateway.answer_to(trajectory, path, bytes(body), retry=retry)
        answer.waiting += 1
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            waited: list[asyncio.Future[Any]] = [answer.done, gone]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if answer.done.done() and not gone.done():
                status, content_type, content = answer.done.result()
                await Response(content, status, media_type=content_type)(scope, receive, send)
                answer.delivered = True
        finally:
            answer.waiting -= 1
            gone.cancel()

    def _other(self, scope: Mapping[str, Any], path: str) -> Response:
        names = (self.gateway.model, *self.gateway.adapters)
        models = [
            {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "policy"} for name in names
        ]
        if scope["method"] == "GET" and path == "/v1/models":
            return JSONResponse({"object": "list", "data": models, "has_more": False})
        if scope["method"] == "GET" and path.startswith("/v1/models/"):
            for model in models:
                if model["id"] == path.removeprefix("/v1/models/"):
                    return JSONResponse(model)
        served = ", ".join((*SAMPLING_PATHS, COUNT_TOKENS, "/v1/models"))
        return self.refusal(scope, 404, f"{scope['method']} {path} is not served: use {served}")


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the length of a body, if the headers say it."""
    given = dict(headers).get(b"content-length", b"")
    return min(int(given), MAX_BODY_BYTES) if given.isdigit() and len(given) < 20 else 0


def _parts(path: str) -> tuple[str, str]:
    """Return (name of the trajectory, path after it)."""
    name, _, rest = path.lstrip("/").partition("/")
    return name, f"/{rest}"


async def _until_gone(receive: Callable[..., Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
