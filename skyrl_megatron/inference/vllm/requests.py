"""Requests and answers in vLLM's terms and in ours.

Where a method raises on several workers, vLLM's executor reads no answer after the first error, and takes those of the
other workers for answers to its next call (v1/executor/multiproc_executor.py, ``get_response``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import Generation, OpenAIAnswer
from skyrl_megatron.inference.sampling_params import WrongType, refused, typed_sampling
from skyrl_megatron.types import TokenSupport

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


GREEDY_BELOW = 1e-5
"""Temperatures that vLLM takes for 0."""


EVERY_TOKEN = 1 << 24
"""A top-k that leaves every vocabulary whole."""


def sampling_parameters(request_id: str, sampling: Mapping[str, Any], *, support: bool = False) -> Any:
    """Make vLLM's sampling parameters, with the log-prob of the sampled token alone. Raises RequestError.

    ``support``: of an engine that returns what tokens are sampled from. It takes no request without top-k, to bound
    what is returned, and no greedy one: that is a top-k of 1.
    """
    from skyrl_megatron.inference.vllm import compat

    try:
        keys = typed_sampling(sampling)
    except WrongType as error:
        raise refused(request_id, error) from error
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
    """Turn vLLM's last output of a request into ours; raise the error if it ended with one. ``version``: of the
    adapter that all of it was sampled with; None: vLLM says which weights it was sampled with."""
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


def in_our_terms(refusal: bytes) -> bytes:
    """Return a refusal of vLLM's server with the run's setting in place of a server's options."""
    for option in (b"--enable-auto-tool-choice and --tool-call-parser", b"--tool-call-parser"):
        refusal = refusal.replace(option, b"generator.inference_engine.tool_call_parser")
    return refusal


@contextlib.contextmanager
def refusals(request_id: str) -> Iterator[None]:
    """Raise vLLM's objections to a request as RequestError."""
    from skyrl_megatron.inference.vllm import compat

    try:
        yield
    except RequestError:
        raise
    except (ValueError, TypeError, compat.VLLMClientError) as error:
        raise RequestError(f"request {request_id}: {error}") from error
