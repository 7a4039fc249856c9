"""What the rest of the system asks of an inference engine. Tokens in, tokens out; no Ray, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight: frozen until resume, finished first, or ended with what they have."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled continuation."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the distribution it was sampled from, nats."""
    finish_reason: str
    """``stop`` (end of sequence or stop string), ``length``, or ``abort``."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, first token, token after the last) of each span; more than one when weights changed midway."""


class InferenceEngine(Protocol):
    """One engine, however many processes it takes. Every method is a coroutine."""

    async def start(self) -> None:
        """Load the model and get ready. Raises EngineError with the engine's own last words."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> Generation:
        """Sample one continuation. ``sampling``: keys of vLLM's ``SamplingParams``."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of tokens 1 … n−1 given those before them, under the current weights, nats."""

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens it has."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating; new requests wait until :meth:`resume`."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    async def connect_weights(self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int) -> None:
        """Join the group of every trainer rank that sends weights."""

    async def update_weights(self, metadata: Sequence[Sequence[tuple[str, str, Sequence[int]]]], version: str) -> None:
        """Start, receive, finish: everything that the senders announced, then take on ``version``."""

    async def weight_checksums(self) -> list[list[list[int]]]:
        """Per worker rank, per sender, per bucket of the last update."""

    async def version(self) -> str:
        """The version of the weights in use."""

    async def shutdown(self) -> None:
        """End the engine and its processes."""
