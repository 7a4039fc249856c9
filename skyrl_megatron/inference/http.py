"""One HTTP endpoint over all engines: OpenAI's completions and chat completions, and tokens in / tokens out.

The OpenAI answers are vLLM's own: each request is handed to the OpenAI application of one engine, chosen as every
other request is, and its answer streamed back. Token requests go through the client, with its retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from skyrl_megatron.errors import EngineError, RequestError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.http_guard import MAX_BODY_BYTES, guarded, json_of, refusal
from skyrl_megatron.inference.pool import WITHDRAW_S
from skyrl_megatron.inference.request_types import TOKENS, WrongType, model_of, typed_sampling, typed_tokens

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
    """Build the application. Every request needs ``Authorization: Bearer <token>``, but for ``GET /health``.

    Answers 401 without the token, 413 for a body above ``max_body_bytes``, 400 for a request that no engine can
    serve, 503 when no engine serves. The header ``x-session-id`` keeps a conversation on one engine; answers carry the
    published version in ``x-policy-version``. A request's ``model`` is ``model``, or one of ``adapters`` where there
    are several; it must then name one.
    """
    app = guarded(token, max_body_bytes)

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


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "policy"}


async def _answer(client: InferenceClient, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    try:
        await request.body()  # what comes after it is that the client is gone
        response = await _while_waited_for(request, work)
    except RequestError as error:
        response = refusal(400, str(error))
    except EngineError as error:
        response = refusal(503, str(error))
    response.headers[VERSION_HEADER] = client.pool.published
    return response


async def _while_waited_for(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Await an answer; end the sampling for it when its client closes the connection."""
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
    return refusal(404, f"no model {name!r}: there are {', '.join(served)}")


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
    """Answer as vLLM's own route of this name does, sampled tokens' log-probs included."""
    body = await json_of(request)
    try:
        prompt, sampling = typed_tokens(body["token_ids"]), typed_sampling(dict(body.get("sampling_params") or {}))
        adapter = body.get("model") if body.get("model") in adapters else ""
    except WrongType as error:
        raise RequestError(f"{TOKENS}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{TOKENS}: needs token_ids and sampling_params: {error!r}") from error
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
