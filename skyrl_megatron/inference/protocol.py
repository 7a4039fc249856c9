"""The interface of an inference engine: token ids in, token ids out. Imports neither Ray nor vLLM.

``vllm/vllm_engine.py`` implements :class:`InferenceEngine` with vLLM in this process, and ``workers/engines.py`` runs
it in a Ray actor. ``vllm/remote.py`` implements it with a vLLM server. A custom engine needs all methods. If it shares
no GPUs with the trainer, ``sleep`` and ``wake`` may do nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from skyrl_megatron.types import TokenSupport

type OpenAIAnswer = AsyncGenerator[tuple[int, str] | bytes, None]
"""(status, content type) first, then the chunks of the body."""
INITIAL_VERSION = "initial"
"""Version of the weights that an engine loads from its model folder."""
ENGINE_KEY = "VLLM_API_KEY"
"""Environment variable with the token of a vLLM server. vLLM itself checks it only on ``/v1`` and ``/inference``."""
PauseMode = Literal["keep", "wait", "abort"]
"""What happens to requests in flight: they are frozen until resume, finish first, or are aborted."""
WeightMetadata = Sequence[Sequence[Any]]
"""Tensors that each trainer rank sends: ``TensorMeta`` objects, or tuples of their fields."""


FINISH_REASONS = frozenset({"stop", "length", "abort", "error", "repetition"})
"""vLLM's reasons: end of sequence or stop string, limit of tokens, ended by a client, failed, and a repetition that
``repetition_detection`` found."""
CUT_OFF = frozenset({"length", "repetition"})
"""Reasons of responses that the policy did not end: they count as truncated."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled continuation."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token in nats under softmax(logits / temperature), over its ``support`` if there is one.

    Without ``support``, this is the sampling distribution, unless top-p, top-k, min-p or a penalty changes that.
    """
    finish_reason: str
    """One of :data:`FINISH_REASONS`."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, first token, end) of each span. There are several if the weights changed during the request."""
    routed_experts: Any = None
    """[tokens − 1, L, K] uint8/uint16: experts of each token except the last, if the engine returns them."""
    support: TokenSupport | None = None
    """The token ids that each token was sampled from, if the engine returns them."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample."""

    request_id: str
    """Unique among the requests that an engine has in flight."""
    prompt_token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    """Keys of vLLM's ``SamplingParams``."""
    adapter: str = ""
    """Name of the adapter to sample with; empty if there are not several."""


class InferenceEngine(Protocol):
    """One engine, which may have several processes. Every method is a coroutine and may be called concurrently.

    Methods raise EngineGoneError if the engine is dead, and RequestError for a request that it cannot serve.
    """

    async def start(self) -> None:
        """Load the model. Raises EngineError with the engine's last errors."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        """Sample one continuation. Parameters as in :class:`SampleRequest`."""

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Sample all requests. They are admitted in order before the first one starts, so that batches are the same in
        every run."""

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        """Return log-probs of tokens 1 … n−1 at temperature 1, in nats."""

    async def abort(self, request_id: str) -> None:
        """Abort a request. It returns the tokens that it has."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating. New requests wait until :meth:`resume`."""

    async def resume(self) -> None:
        """Resume after :meth:`pause`."""

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""

    async def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of KV cache and weights. Level 1 moves weights to host memory, level 2 drops them."""

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again. ``tags``: ``weights``, ``kv_cache``; None: both."""

    async def worker_count(self) -> int:
        """Return the number of processes with weights: tp · pp · dp."""

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        """Join the group of every trainer rank that sends weights. ``options``: ``transport``, ``bucket_bytes``,
        ``timeout_s``, and, where every worker gets its own part, ``transfers`` and the ``sizes`` of buckets that are
        measured (``weight_sync/vllm_backend.py``)."""

    async def weight_targets(self, metadata: Sequence[Any]) -> list[Any] | str:
        """Return the route of each worker for whole tensors (``weight_sync/slices.py``, ``TargetMap.wire``), or why
        there is none. The engine must be paused, and has the weights that it had."""

    async def start_update(self) -> None:
        """Prepare for new weights. The engine must be paused, and serves nothing until :meth:`finish_update`."""

    async def receive_weights(self, metadata: WeightMetadata) -> list[list[list[int]]]:
        """Receive and load the tensors of ``metadata``. Return checksums per worker, per sender, per bucket."""

    async def finish_update(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        """Process the loaded weights, clear cached keys and values, and set ``version``.

        ``adapters``: received adapter → version, if adapters are synced instead of weights.
        """

    async def abort_update(self) -> None:
        """Abort an update that cannot be finished. The weights are wrong until the next complete update."""

    async def version(self) -> str:
        """Return the version of the current weights."""

    async def set_version(self, version: str) -> None:
        """Set the version of the current weights."""

    async def health(self) -> None:
        """Return when every process of the engine has answered. Raises EngineGoneError."""

    def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        """Answer an OpenAI request as vLLM's server does."""

    async def shutdown(self) -> None:
        """End the engine and its processes."""

    async def kill(self) -> None:
        """Kill the processes of an engine that does not answer."""


class CallExtension:
    """A worker method that calls other methods and returns their exceptions; a base of ``compat.WorkerExtension``.

    If a method raises on several workers, vLLM's executor stops reading at the first error, and takes the other
    workers' results for those of its next call (v1/executor/multiproc_executor.py, ``get_response``).
    """

    def skyrl_call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Return (True, the result of a method) or (False, the error message)."""
        try:
            return True, getattr(self, method)(*arguments)
        except Exception as error:
            return False, str(error) or repr(error)


def worker_results(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of ``skyrl_call`` by worker. Raises RuntimeError with the first worker that failed."""
    for worker, (done, answer) in enumerate(answers):
        if not done:
            raise RuntimeError(f"worker {worker}: {answer}")
    return [answer for _, answer in answers]
