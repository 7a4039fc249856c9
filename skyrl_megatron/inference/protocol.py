"""The interface of an inference engine. Tokens in, tokens out; no Ray, no vLLM.

:class:`InferenceEngine` declares every method once: ``vllm/engine.py`` implements it with vLLM in this process,
``vllm/remote.py`` with a server; ``workers/engines.py`` puts the former into a Ray actor. An engine of another
kind needs all of its methods; one without GPUs to share may do nothing in ``sleep`` and ``wake``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from skyrl_megatron.types import TokenSupport

type OpenAIAnswer = AsyncGenerator[tuple[int, str] | bytes, None]
"""(status, content type) first, then the body in pieces."""
INITIAL_VERSION = "initial"
"""Version of the weights that an engine loads from its folder."""
ENGINE_KEY = "VLLM_API_KEY"
"""Variable with the token of a vLLM server. vLLM itself asks for it on ``/v1`` and ``/inference`` alone."""
PauseMode = Literal["keep", "wait", "abort"]
"""Fate of the requests in flight: frozen until resume, finished first, or ended with what they have."""
WeightMetadata = Sequence[Sequence[Any]]
"""Tensors that each trainer rank sends: ``TensorMeta`` objects, or tuples of their fields."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled continuation."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under softmax(logits / temperature), nats, over its ``support`` if there is one. Without,
    that is the distribution it was sampled from, unless top-p, top-k, min-p or a penalty changed it further."""
    finish_reason: str
    """``stop`` (end of sequence or stop string), ``length``, or ``abort``."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, first token, token after the last) of each span; more than one when weights changed midway."""
    routed_experts: Any = None
    """[tokens − 1, L, K] uint8/uint16: experts chosen for each token but the last, where the engine returns them."""
    support: TokenSupport | None = None
    """What each token was sampled from, where the engine returns it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample."""

    request_id: str
    """Unique among the requests that an engine has in flight."""
    prompt_token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    """Keys of vLLM's ``SamplingParams``."""
    adapter: str = ""
    """Which of several adapters samples it; empty: the only one, if there is one."""


class InferenceEngine(Protocol):
    """One engine, however many processes it takes. Every method is a coroutine and may be called concurrently.

    Raises EngineGoneError when the engine is dead, RequestError for a request that it cannot serve.
    """

    async def start(self) -> None:
        """Load the model and get ready. Raises EngineError that quotes the engine's last errors."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        """Sample one continuation. ``sampling``: keys of vLLM's ``SamplingParams``; ``adapter``: as in
        :class:`SampleRequest`."""

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Sample all requests, admitted in the given order before the first one starts: the engine then forms the same
        batches every time."""

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        """Return log-probs of tokens 1 … n−1 given those before them, at temperature 1, nats."""

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens it has."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating; new requests wait until :meth:`resume`."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prefixes seen before."""

    async def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of the KV cache and of the weights (level 1 keeps a copy on the host, 2 drops them)."""

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: ``weights``, ``kv_cache``, or both (None)."""

    async def worker_count(self) -> int:
        """Return the number of processes that hold weights: tp · pp · dp."""

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        """Join the group of every trainer rank that sends weights. ``options``: ``transport``, ``bucket_bytes``,
        ``timeout_s``, and, where every worker gets its own part, ``parcels`` and the ``sizes`` of buckets that are
        measured (``weight_sync/vllm_backend.py``)."""

    async def weight_routes(self, metadata: Sequence[Any]) -> list[Any] | str:
        """Return the route of each worker for whole tensors (``weight_sync/slices.py``, ``Route.plain``), or why there
        is none. The engine must be paused, and has the weights that it had."""

    async def start_update(self) -> None:
        """Get ready for new weights. The engine must be paused, and serves nothing until :meth:`finish_update`."""

    async def receive_weights(self, metadata: WeightMetadata) -> list[list[list[int]]]:
        """Receive and load the tensors of ``metadata``; return checksums per worker, per sender, per bucket."""

    async def finish_update(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        """Process what was loaded, forget cached keys and values, take on ``version``. ``adapters``: those that were
        received, where adapters travel → the version of each."""

    async def abort_update(self) -> None:
        """Leave an update that cannot be finished. The weights are wrong until the next whole update."""

    async def version(self) -> str:
        """Return the version of the weights in use."""

    async def set_version(self, version: str) -> None:
        """Name the weights in use."""

    async def health(self) -> None:
        """Return once every process of the engine has answered. Raises EngineGoneError."""

    def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        """Answer an OpenAI request as vLLM's own server does."""

    async def shutdown(self) -> None:
        """End the engine and its processes."""

    async def kill(self) -> None:
        """End the processes of an engine that does not answer any more."""


class AnswerExtension:
    """The method of a worker that calls its others; ``compat.WorkerExtension`` mixes it in."""

    def skyrl_answer(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Return (True, what a method returns) or (False, what went wrong)."""
        try:
            return True, getattr(self, method)(*arguments)
        except Exception as error:
            return False, str(error) or repr(error)


def answers_of(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what workers answered ``skyrl_answer`` with. Raises RuntimeError with the first that went wrong."""
    for worker, (done, answer) in enumerate(answers):
        if not done:
            raise RuntimeError(f"worker {worker}: {answer}")
    return [answer for _, answer in answers]
