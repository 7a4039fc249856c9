"""The inference engines of a run: an actor each on its place, and the client that samples from all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.pool import EnginePool
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.settings import engine_settings
from skyrl_megatron.workers.engine_actor import RayEngine

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import Place

STOP_TIMEOUT_S = 60.0


class Engines:
    """``num_engines`` engines and their client. Coroutines belong to one event loop; :meth:`stop` may run anywhere."""

    def __init__(self, cfg: SkyRLTrainConfig, place: Place) -> None:
        logs, made = run_folder(cfg) / "workers", []
        for number in range(cfg.generator.inference_engine.num_engines):
            settings = engine_settings(cfg, log_file=logs / f"engine_{number}.log")
            made.append(partial(RayEngine, settings, **place.options(number, settings.workers)))
        self.ranks_per_engine = settings.workers
        self.pool = EnginePool(made, wait_s=cfg.trainer.phase_timeout_s)
        self.client = InferenceClient(self.pool, deterministic=bool(cfg.trainer.deterministic))

    @property
    def actors(self) -> list[Any]:
        """The engines' actors, in order."""
        return [slot.engine.actor for slot in self.pool.slots]  # type: ignore[attr-defined]

    async def start(self) -> None:
        """Until all are up. Raises EngineError with what the failing one said."""
        await self.pool.start()

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
    ) -> list[Generation]:
        """One continuation for each prompt, in order; see :class:`InferenceClient`."""
        return await self.client.generate(prompt_token_ids, sampling_params, session_ids)

    def publish(self, version: str) -> None:
        """All engines hold the weights of ``version``, verified: it is what they sample from now on."""
        for slot in self.pool.slots:
            slot.version = version
        self.pool.publish(version)

    def stop(self) -> None:
        """End the engines' processes and actors."""

        async def end() -> None:
            await asyncio.wait_for(self.pool.shutdown(), STOP_TIMEOUT_S)

        try:
            asyncio.run(end())
        except TimeoutError:
            asyncio.run(self._kill())

    async def _kill(self) -> None:
        await asyncio.gather(*(slot.engine.kill() for slot in self.pool.slots), return_exceptions=True)
