"""One HTTP endpoint over all engines: OpenAI's completions and chat completions, and tokens in / tokens out.

The OpenAI answers are vLLM's own: each request is handed to the OpenAI application of one engine, chosen as every
other request is, and its answer streamed back. Token requests go through the client, with its retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from skyrl_megatron.errors import EngineError, RequestError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.http_guard import MAX_BODY_BYTES, guarded, json_of, refusal

VERSION_HEADER = "x-policy-version"
SESSION_HEADER = "x-session-id"
_OPENAI = ("/v1/completions", "/v1/chat/completions")
TOKENS = "/inference/v1/generate"


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
        data = [{"id": name, "object": "model", "owned_by": "policy"} for name in (model, *adapters)]
        return JSONResponse({"object": "list", "data": data})

    @app.post(TOKENS)
    async def tokens(request: Request) -> Response:
        return await _answer(client, _tokens(client, model, adapters, request))

    async def openai(request: Request) -> Response:
        return await _answer(client, _openai(client, request))

    for path in _OPENAI:
        app.add_api_route(path, openai, methods=["POST"])
    return app


async def _answer(client: InferenceClient, work: Any) -> Response:
    try:
        response: Response = await work
    except RequestError as error:
        response = refusal(400, str(error))
    except EngineError as error:
        response = refusal(503, str(error))
    response.headers[VERSION_HEADER] = client.pool.published
    return response


async def _openai(client: InferenceClient, request: Request) -> Response:
    pieces = client.openai(request.url.path, await request.body(), request.headers.get(SESSION_HEADER))
    head = await anext(pieces)
    assert isinstance(head, tuple)
    status, content_type = head
    body = cast(AsyncIterator[bytes], pieces)
    if content_type.startswith("text/event-stream"):
        return StreamingResponse(body, status, media_type=content_type)
    return Response(b"".join([piece async for piece in body]), status, media_type=content_type)


async def _tokens(client: InferenceClient, model: str, adapters: Sequence[str], request: Request) -> Response:
    """Answer as vLLM's own route of this name does, sampled tokens' log-probs included."""
    body = await json_of(request)
    try:
        prompt, sampling = list(body["token_ids"]), dict(body.get("sampling_params") or {})
        adapter = body.get("model") if body.get("model") in adapters else ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{TOKENS}: needs token_ids and sampling_params: {error!r}") from error
    if not prompt or not all(isinstance(token, int) and token >= 0 for token in prompt):
        raise RequestError(f"{TOKENS}: token_ids must be a list of one or more token ids")
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
