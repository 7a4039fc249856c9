"""Convert requests and answers between this package and vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import Generation, OpenAIAnswer
from skyrl_megatron.inference.sampling_params import WrongType, invalid_request, typed_sampling
from skyrl_megatron.types import TokenSupport

LEAVE_S = 10.0
"""How long an application may take to notice that its client has disconnected."""


async def call_app(app: Any, path: str, body: bytes) -> OpenAIAnswer:
    """POST a JSON ``body`` to ``path`` of an ASGI application. Yield (status, content type), then chunks of the body.

    Closing the iterator early disconnects the client.
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
        if not call.done():  # let it end its request: if it is cancelled at once, vLLM continues to generate
            asyncio.get_running_loop().call_later(LEAVE_S, call.cancel)


GREEDY_BELOW = 1e-5
"""vLLM treats lower temperatures as 0."""


EVERY_TOKEN = 1 << 24
"""A top-k larger than any vocabulary."""


def sampling_parameters(request_id: str, sampling: Mapping[str, Any], *, support: bool = False) -> Any:
    """Return vLLM's sampling parameters, with the log-prob of only the sampled token. Raises RequestError.

    ``support``: whether the engine returns the sampling support. vLLM then requires a top-k and rejects greedy
    sampling, so greedy becomes a top-k of 1.
    """
    from skyrl_megatron.inference.vllm import compat

    try:
        keys = typed_sampling(sampling)
    except WrongType as error:
        raise invalid_request(request_id, error) from error
    nested = {
        "structured_outputs": compat.StructuredOutputsParams,
        "repetition_detection": compat.RepetitionDetectionParams,
    }
    keys["logprobs"] = None if keys.get("logprobs", 0) is None else 0
    keys.setdefault("detokenize", bool(keys.get("stop")))
    if support and keys.get("temperature", 1.0) < GREEDY_BELOW:
        keys |= {"temperature": 1.0, "top_k": 1}
    elif support and keys.get("top_k", 0) <= 0:
        keys["top_k"] = EVERY_TOKEN
    with refusals(request_id):
        keys |= {key: kind(**keys[key]) for key, kind in nested.items() if isinstance(keys.get(key), Mapping)}
        return compat.SamplingParams(**keys, output_kind=compat.RequestOutputKind.FINAL_ONLY, skip_clone=True)


def generation_of(final: Any, version: str | None = None) -> Generation:
    """Convert vLLM's final output of a request, or raise its error. ``version``: the adapter version of all its
    tokens; None: take the weight versions from vLLM."""
    if isinstance(final, BaseException):
        raise final
    sample = final.outputs[0]
    ids = list(sample.token_ids)
    logprobs = sample.logprobs
    spans = [(span.version, span.start, span.end) for span in sample.weight_versions or []]
    return Generation(
        token_ids=ids,
        logprobs=[] if logprobs is None else [at[token].logprob for token, at in zip(ids, logprobs, strict=True)],
        finish_reason=sample.finish_reason or "abort",
        versions=spans if version is None else [(version, 0, len(ids))],
        routed_experts=sample.routed_experts,
        support=None if sample.sampling_mask is None else TokenSupport.of(sample.sampling_mask.token_ids),
    )


def with_config_keys(body: bytes) -> bytes:
    """Replace options of vLLM's command line in an error response by the run's configuration key."""
    for option in (b"--enable-auto-tool-choice and --tool-call-parser", b"--tool-call-parser"):
        body = body.replace(option, b"generator.inference_engine.tool_call_parser")
    return body


@contextlib.contextmanager
def refusals(request_id: str) -> Iterator[None]:
    """Convert vLLM's validation errors of a request to RequestError."""
    from skyrl_megatron.inference.vllm import compat

    try:
        yield
    except RequestError:
        raise
    except (ValueError, TypeError, compat.VLLMClientError) as error:
        raise RequestError(f"request {request_id}: {error}") from error
