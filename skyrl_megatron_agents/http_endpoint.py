"""One HTTP endpoint for all engines: OpenAI completions and chat completions, and token requests.

It listens on loopback by default, requires a token, and limits the size and time of headers and bodies and the number
of connections. uvicorn itself limits only idle connections after a request (``timeout_keep_alive``) and the size of
headers (``h11_max_incomplete_event_size``). It keeps a connection that never completes its headers.

vLLM's OpenAI application of one engine answers an OpenAI request, and the answer is streamed. Token requests go
through the client, which retries them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import EngineError, LaunchError, RequestError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.engine_pool import WITHDRAW_S
from skyrl_megatron.inference.protocol import ENGINE_KEY
from skyrl_megatron.inference.sampling_params import (
    TOKENS,
    WrongType,
    check_body,
    model_of,
    typed_sampling,
    typed_tokens,
)

if TYPE_CHECKING:
    from skyrl_megatron.workers.engines import InferenceEngineClient

HEAD_S = 10.0
"""Time limit for the headers of a request, from the connection or the end of the previous response."""
MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS, MIN_CONNECTIONS = 8192, 16


@cache
def connections_allowed() -> int:
    """Return the limit of open connections: half of the file descriptors that are free at the first call."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - len(os.listdir("/proc/self/fd"))
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, left // 2))


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with limits, for ``uvicorn.Config(http=…)``.

    A connection without a request is closed after ``HEAD_S``. Above :func:`connections_allowed`, a new connection
    closes the one that has waited longest for a request.
    """

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


MAX_BODY_BYTES = 16 << 20
MAX_ENGINE_BODY_BYTES = 1 << 30
"""Enough for the metadata of a million tensors."""
BODY_S, ENGINE_BODY_S = 60.0, 600.0
"""Time limit for a whole body."""


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error response in OpenAI's format. ``param``: the field that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(content, status, headers)


def guarded_app(token: str, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Return a FastAPI application without routes that has a :class:`Guard`.

    An exception in a route becomes an error response without the exception's text, and is logged.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, max_body_bytes=max_body_bytes)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, f"{request.url.path}: {type(error).__name__}, see the log of the run")

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
        )

    app.add_exception_handler(Exception, failed)
    app.add_exception_handler(HTTPException, unknown)
    return app


async def json_body(request: Request) -> Any:
    """Return the JSON body of a request. Raises RequestError if it is not JSON or nested too deep."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{request.url.path}: the body is not valid JSON: {error}") from error


class Guard:
    """ASGI middleware that checks the token, size, time and types of a request.

    ``GET /health`` without a body needs no token. Without the token, no body is read.
    """

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
        if (refused := self.refused(scope, headers)) is not None:
            return await self.refusal(scope, *refused, unread=True)(scope, receive, send)
        too_large = f"the body is larger than {self.max_body_bytes} bytes"
        try:
            if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
                return await self.refusal(scope, 413, too_large, unread=True)(scope, receive, send)
        except ValueError:
            wrong = "content-length is not a number"
            return await self.refusal(scope, 400, wrong, unread=True)(scope, receive, send)
        body = bytearray()  # a chunked body has no content-length
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
                        return await self.refusal(scope, 413, too_large, unread=True)(scope, receive, send)
        except TimeoutError:
            too_slow = f"the body did not arrive within {self.body_s:g} s"
            return await self.refusal(scope, 408, too_slow, unread=True)(scope, receive, send)
        try:
            check_body(scope["path"], bytes(body))
        except WrongType as error:
            refusal = self.refusal(scope, 400, _printable(str(error)), _printable(error.path))
            return await refusal(scope, receive, send)
        await self.app(scope, _replayed(bytes(body), receive), send)

    def refused(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return (status, message) for a request without the token; None for one that may be read."""
        known = secrets.compare_digest(headers.get(b"authorization", b""), self.expected)
        return None if known or _is_open(scope, headers) else (401, "wrong or missing bearer token")

    def refusal(
        self, scope: Mapping[str, Any], status: int, message: str, param: str | None = None, *, unread: bool = False
    ) -> Response:
        """Return an error response; ``unread``: it closes the connection, because the body is not read."""
        return error_response(status, message, param, {"connection": "close"} if unread else None)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _is_open(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request needs no token."""
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return scope["path"] == "/health" and scope["method"] in ("GET", "HEAD") and not has_body


class EngineGuard(Guard):
    """The guard of a vLLM server, whose endpoints for weights and workers check no token.

    vLLM constructs it (``--middleware``) with the application only, so the token comes from the environment.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app, os.environ[ENGINE_KEY], MAX_ENGINE_BODY_BYTES, ENGINE_BODY_S)


def _replayed(body: bytes, receive: Callable[..., Any]) -> Callable[..., Any]:
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pending.pop() if pending else await receive()

    return again


VERSION_HEADER = "x-policy-version"
SESSION_HEADER = "x-session-id"
_OPENAI = ("/v1/completions", "/v1/chat/completions")


def build_app(
    client: InferenceClient,
    model: str,
    token: str,
    max_body_bytes: int = MAX_BODY_BYTES,
    adapters: Sequence[str] = (),
) -> FastAPI:
    """Build the application. Every request except ``GET /health`` needs ``Authorization: Bearer <token>``.

    Status codes: 401 without the token, 413 for a body above ``max_body_bytes``, 400 for a request that no engine can
    serve, 503 when no engine serves. The header ``x-session-id`` keeps a conversation on one engine. Responses have
    the published version in ``x-policy-version``. A request's ``model`` is ``model``, or with several ``adapters``,
    one of them.
    """
    app = guarded_app(token, max_body_bytes)

    @app.get("/health")
    async def health() -> Response:
        serving = any(slot.version == client.pool.published for slot in client.pool.alive())
        return JSONResponse({"engines": client.pool.describe()}, 200 if serving else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        data = [_model(name) for name in (model, *adapters)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JSONResponse(_model(name)) if name in (model, *adapters) else _no_model(name, (model, *adapters))

    @app.post(TOKENS)
    async def tokens(request: Request) -> Response:
        return await _answer(client, request, _tokens(client, model, adapters, request))

    async def openai(request: Request) -> Response:
        return await _answer(client, request, _openai(client, (model, *adapters), request))

    for path in _OPENAI:
        app.add_api_route(path, openai, methods=["POST"])
    return app


class HttpEndpoint:
    """The endpoint of a run with ``generator.inference_engine.enable_http_endpoint``."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self.client = client
        self.server: HttpServer | None = None
        self.url: str | None = None

    async def start(self) -> None:
        """Serve. Raises LaunchError if the port is in use or the token cannot be read."""
        cfg, settings = self.client.cfg, self.client.settings
        engine = cfg.generator.inference_engine
        path = Path(engine.http_token_path or run_folder(cfg) / "http_token").expanduser()
        adapters = tuple(filter(None, settings.adapters.names)) if settings.adapters else ()
        app = build_app(
            self.client, settings.served_model_name or settings.model, endpoint_token(path), adapters=adapters
        )
        self.server = HttpServer(app, engine.http_endpoint_host, engine.http_endpoint_port)
        await self.server.start()
        self.url = self.server.url
        self.client.say(f"endpoint: {self.url}/v1 (OpenAI API), bearer token in {path}")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "policy"}


async def _answer(client: InferenceClient, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    try:
        await request.body()  # the next message then means that the client has disconnected
        response = await _while_waited_for(request, work)
    except RequestError as error:
        response = error_response(400, str(error))
    except EngineError as error:
        response = error_response(503, str(error))
    response.headers[VERSION_HEADER] = client.pool.published
    return response


async def _while_waited_for(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Await a response. Cancel it if the client closes the connection."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)  # nobody reads it
        return await answer
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.wait([answer, gone], timeout=WITHDRAW_S)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _no_model(name: str, served: Sequence[str]) -> Response:
    return error_response(404, f"unknown model {name!r}: use one of {', '.join(served)}")


async def _openai(client: InferenceClient, served: Sequence[str], request: Request) -> Response:
    body = await request.body()
    if (name := model_of(body)) and name not in served:
        return _no_model(name, served)
    pieces = client.openai(request.url.path, body, request.headers.get(SESSION_HEADER))
    head = await anext(pieces)
    assert isinstance(head, tuple)
    status, content_type = head
    answer = cast(AsyncIterator[bytes], pieces)
    if content_type.startswith("text/event-stream"):
        return StreamingResponse(answer, status, media_type=content_type)
    return Response(b"".join([piece async for piece in answer]), status, media_type=content_type)


async def _tokens(client: InferenceClient, model: str, adapters: Sequence[str], request: Request) -> Response:
    """Answer as vLLM's endpoint of this name, with the log-probs of the sampled tokens."""
    body = await json_body(request)
    try:
        prompt, sampling = typed_tokens(body["token_ids"]), typed_sampling(dict(body.get("sampling_params") or {}))
        adapter = body.get("model") if body.get("model") in adapters else ""
    except WrongType as error:
        raise RequestError(f"{TOKENS}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{TOKENS}: the body needs token_ids and sampling_params: {error!r}") from error
    sampling.setdefault("max_tokens", None)  # as vLLM's route: until the context is full, not SamplingParams' 16
    session = request.headers.get(SESSION_HEADER)
    generation = await client.sample(prompt, sampling, session, adapter)
    pairs = zip(generation.token_ids, generation.logprobs, strict=False)
    spans = [{"version": version, "start": start, "end": end} for version, start, end in generation.versions]
    choice = {
        "index": 0,
        "token_ids": generation.token_ids,
        "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]},
        "finish_reason": generation.finish_reason,
        "weight_versions": spans,
    }
    return JSONResponse({"model": adapter or model, "choices": [choice]})


ENDPOINT_PORT = "generator.inference_engine.http_endpoint_port"
BACKLOG = 2048


class HttpServer:
    """Serves an application on the running event loop.

    ``port`` 0: any free port. ``key``: the setting of the port, for messages. Raises LaunchError if it cannot listen.
    """

    def __init__(self, app: Any, host: str, port: int, key: str = ENDPOINT_PORT) -> None:
        self._socket = listening_socket(host, port, key)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            backlog=min(BACKLOG, connections_allowed()),  # asyncio accepts this many connections at a time
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start serving. Return when the server accepts connections."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http endpoint")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise LaunchError(f"the endpoint on {self.url} did not start")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Accept no more connections, wait for the open ones, and close the port."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the run handles signals, not the endpoint


def listening_socket(host: str, port: int, key: str) -> socket.socket:
    """Return a listening socket. Raises LaunchError with ``key``, the setting or option of the port."""
    try:
        made = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise LaunchError(
            f"{key}={port}: cannot listen on {host}: {error.strerror}; set another port, or 0 for any free port"
        ) from error
    # Connections inherit it. asyncio sets it only for sockets with an explicit protocol; without it the body of an
    # answer waits for the client's delayed acknowledgement of the headers, 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def endpoint_token(path: Path, key: str = "http_token_path") -> str:
    """Return the token from a file that only its owner can read (mode 0600). Create the file if it does not exist.

    Raises LaunchError with ``key`` if others can read the file, or if it is empty or cannot be created.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise LaunchError(f"{key}={path}: other users can read the file: run chmod 600 {path}")
        token = path.read_text().strip()
    except OSError as error:
        raise LaunchError(f"{key}={path}: {error.strerror}; name a file that this user can write") from error
    if not token:
        raise LaunchError(f"{key}={path}: the file is empty: delete it, or write a token to it")
    return token
