"""Requests and answers in vLLM's terms and in ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.request_types import WrongType, refused, typed_sampling
from skyrl_megatron.types import TokenSupport

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
