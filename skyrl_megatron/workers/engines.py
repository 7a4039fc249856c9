"""The inference engines of a run: one actor each, started side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron import device
from skyrl_megatron.config.role_layout import engine_ranks
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.vllm_engine import EngineSettings
from skyrl_megatron.workers.engine_actor import EngineActor

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import Place

STOP_TIMEOUT_S = 30.0
CPU_CACHE_BYTES = 256 << 20
"""KV cache of an engine on CPU, unless ``engine_init_kwargs.kv_cache_memory_bytes`` says otherwise."""


def engine_settings(cfg: SkyRLTrainConfig) -> EngineSettings:
    """What every engine of the run is started with."""
    engine = cfg.generator.inference_engine
    extra = dict(engine.engine_init_kwargs)
    cache = extra.pop("kv_cache_memory_bytes", None if device.has_cuda() else CPU_CACHE_BYTES)
    return EngineSettings(
        cfg.trainer.policy.model.path,
        tensor_parallel_size=engine.tensor_parallel_size,
        dtype=engine.model_dtype,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_bytes=cache,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        seed=cfg.trainer.seed,
        extra=extra,
    )


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
        references = []
        for number, (prompt, sampling) in enumerate(zip(prompt_token_ids, each, strict=True)):
            engine = self.actors[number % len(self.actors)]
            self._requests += 1
            references.append(engine.generate.remote(f"request-{self._requests}", prompt, sampling))
        return list(await asyncio.gather(*references))

    def stop(self) -> None:
        """Ask every engine to end its processes, then end the actors."""
        ray.wait(
            [actor.shutdown.remote() for actor in self.actors], num_returns=len(self.actors), timeout=STOP_TIMEOUT_S
        )
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
