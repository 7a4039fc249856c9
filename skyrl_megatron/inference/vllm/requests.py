"""Requests and answers in vLLM's terms and in ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.sampling import unknown_key
from skyrl_megatron.inference.vllm.adapters import Held


def sampling_parameters(request_id: str, sampling: Mapping[str, Any]) -> Any:
    """Make vLLM's sampling parameters, with the log-prob of the sampled token alone. Raises RequestError."""
    from skyrl_megatron.inference.vllm import compat

    keys = dict(sampling)
    known = compat.sampling_keys()
    for key in keys:
        if key not in known:
            raise RequestError(f"request {request_id}: {unknown_key(key, known)}")
    keys["logprobs"] = None if keys.get("logprobs", 0) is None else 0
    keys.setdefault("detokenize", bool(keys.get("stop")))
    with refusals(request_id):
        return compat.SamplingParams(**keys, output_kind=compat.RequestOutputKind.FINAL_ONLY, skip_clone=True)


def generation_of(final: Any, held: Held | None = None) -> Generation:
    """Turn vLLM's last output of a request into ours; raise the error if it ended with one. ``held``: the adapter that
    all of it was sampled with."""
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
        versions=spans if held is None else [(held.version, 0, len(ids))],
        routed_experts=sample.routed_experts,
    )


@contextlib.contextmanager
def refusals(request_id: str) -> Iterator[None]:
    """Raise vLLM's objections to a request as RequestError."""
    from skyrl_megatron.inference.vllm import compat

    try:
        yield
    except (ValueError, TypeError, compat.VLLMClientError) as error:
        raise RequestError(f"request {request_id}: {error}") from error
