"""The inference engines of a run: one actor each, started side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron.config.role_layout import engine_ranks
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.protocol import Generation, SampleRequest
from skyrl_megatron.inference.settings import engine_settings
from skyrl_megatron.workers.engine_actor import EngineActor

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import Place

STOP_TIMEOUT_S = 30.0


class Engines:
    """``num_engines`` actors. :meth:`wait` until they are up; :meth:`stop` ends them and their processes."""

    def __init__(self, cfg: SkyRLTrainConfig, place: Place) -> None:
        self.timeout_s = cfg.trainer.phase_timeout_s
        settings, devices = engine_settings(cfg), engine_ranks(cfg)
        self.actors: list[Any] = [
            EngineActor.options(**place.options(number, devices)).remote(settings)
            for number in range(cfg.generator.inference_engine.num_engines)
        ]
        self._requests = 0
        self._starting = [actor.start.remote() for actor in self.actors]

    def wait(self) -> None:
        """Until all are up. Raises EngineError with what the failing one said."""
        for number, reference in enumerate(self._starting):
            try:
                ray.get(reference, timeout=self.timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                raise EngineError(
                    f"engine {number} is not up within {self.timeout_s:g} s (trainer.phase_timeout_s)"
                ) from error
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, EngineError) else error) from error
            except ray.exceptions.RayActorError as error:
                raise EngineError(f"engine {number} died while it started: {error}") from error

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
    ) -> list[Generation]:
        """One continuation for each prompt, in order; prompts are dealt out to the engines in turn."""
        each = [sampling_params] * len(prompt_token_ids) if isinstance(sampling_params, Mapping) else sampling_params
        requests = []
        for prompt, sampling in zip(prompt_token_ids, each, strict=True):
            self._requests += 1
            requests.append(SampleRequest(f"request-{self._requests}", prompt, sampling))
        shares = [requests[number :: len(self.actors)] for number in range(len(self.actors))]
        batches = [engine.generate_batch.remote(share) for engine, share in zip(self.actors, shares, strict=True)]
        answers = await asyncio.gather(*batches)
        out: list[Any] = [None] * len(requests)
        for number, batch in enumerate(answers):
            out[number :: len(self.actors)] = batch
        return out

    def stop(self) -> None:
        """Ask every engine to end its processes, then end the actors."""
        ray.wait(
            [actor.shutdown.remote() for actor in self.actors], num_returns=len(self.actors), timeout=STOP_TIMEOUT_S
        )
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
