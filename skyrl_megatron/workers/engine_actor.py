"""A Ray actor around one inference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from skyrl_megatron.inference.protocol import Generation, PauseMode
from skyrl_megatron.inference.vllm_engine import EngineSettings, VLLMEngine


@ray.remote(num_cpus=1, max_concurrency=512)
class EngineActor:
    """Hands every call to its engine (``inference/protocol.py``)."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = VLLMEngine(settings)

    async def start(self) -> None:
        await self.engine.start()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> Generation:
        return await self.engine.generate(request_id, prompt_token_ids, sampling)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self.engine.score(token_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def connect_weights(self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int) -> None:
        await self.engine.connect_weights(senders, rank_offset, world_size)

    async def update_weights(self, metadata: Any, version: str) -> None:
        await self.engine.update_weights(metadata, version)

    async def weight_checksums(self) -> list[list[list[int]]]:
        return await self.engine.weight_checksums()

    async def version(self) -> str:
        return await self.engine.version()

    async def shutdown(self) -> None:
        await self.engine.shutdown()
