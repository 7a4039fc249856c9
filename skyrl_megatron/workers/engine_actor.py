"""A Ray actor around one inference engine, and the handle through which the client, which knows no Ray, calls it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from skyrl_megatron.errors import EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.protocol import Generation, PauseMode, SampleRequest, WeightMetadata
from skyrl_megatron.inference.vllm.engine import EngineSettings, VLLMEngine
from skyrl_megatron.plugins import ENGINES


@ray.remote(num_cpus=1, max_concurrency=4096)
class EngineActor:
    """Hands every call to its engine (``inference/protocol.py``). ``gpus``: ids of the GPUs to see instead of those
    that Ray gave it, its own first."""

    def __init__(self, settings: EngineSettings, gpus: Sequence[str] | None = None, backend: str = "vllm") -> None:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.engine = (ENGINES.find(backend) or VLLMEngine)(settings)

    async def start(self) -> list[int]:
        """Start the engine; its process ids."""
        await self.engine.start()
        gc.collect()
        gc.freeze()  # the garbage of requests is not looked for among what the engine keeps
        return [os.getpid(), *self.engine.process_ids()]

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> Generation:
        return await self.engine.generate(request_id, prompt_token_ids, sampling)

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        return await self.engine.generate_batch(requests)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self.engine.score(token_ids)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        await self.engine.sleep(level)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        await self.engine.wake(tags)

    async def worker_count(self) -> int:
        return await self.engine.worker_count()

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        await self.engine.connect_weights(senders, rank_offset, world_size, **options)

    async def start_update(self) -> None:
        await self.engine.start_update()

    async def receive_weights(self, announced: WeightMetadata) -> list[list[list[int]]]:
        return await self.engine.receive_weights(announced)

    async def finish_update(self, version: str) -> None:
        await self.engine.finish_update(version)

    async def abort_update(self) -> None:
        await self.engine.abort_update()

    async def update_weights(self, announced: WeightMetadata, version: str) -> None:
        await self.engine.update_weights(announced, version)

    async def weight_checksums(self) -> list[list[list[int]]]:
        return await self.engine.weight_checksums()

    async def version(self) -> str:
        return await self.engine.version()

    async def set_version(self, version: str) -> None:
        await self.engine.set_version(version)

    async def health(self) -> None:
        await self.engine.health()

    async def openai(self, path: str, body: bytes) -> AsyncIterator[tuple[int, str] | bytes]:
        async for piece in self.engine.openai(path, body):
            yield piece

    async def shutdown(self) -> None:
        await self.engine.shutdown()

    async def kill(self) -> None:
        await self.engine.kill()


class RayEngine:
    """An engine in an actor, as the client and the publisher see it: the methods of ``InferenceEngine``.

    A lost actor becomes EngineGoneError; an error inside keeps its type, without the actor's traceback around it.
    """

    def __init__(
        self, settings: EngineSettings, *, backend: str = "vllm", gpus: Sequence[str] | None = None, **options: Any
    ) -> None:
        """``gpus``: see :class:`EngineActor`. ``options``: of the actor, such as ``num_cpus`` or a
        ``scheduling_strategy``."""
        self.actor = EngineActor.options(**options).remote(settings, gpus, backend)
        self._processes: list[int] = []
        self._node: str | None = None

    async def start(self) -> None:
        self._processes = await self._call("start")
        self._node = ray.get_runtime_context().get_node_id()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return self._call(name, *args, **kwargs)

        return call

    async def openai(self, path: str, body: bytes) -> AsyncIterator[tuple[int, str] | bytes]:
        with _lost_actors():
            async for piece in self.actor.openai.remote(path, body):
                yield await piece

    async def shutdown(self) -> None:
        await self._call("shutdown")
        ray.kill(self.actor)

    async def kill(self) -> None:
        """Kill the actor, and the engine's processes where they are on this machine: a stopped one (SIGSTOP) does not
        notice that its parent is gone."""
        ray.kill(self.actor)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with _lost_actors():
            return await getattr(self.actor, name).remote(*args, **kwargs)


@contextlib.contextmanager
def _lost_actors():
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise EngineGoneError(f"the engine's actor is gone: {str(error).splitlines()[0]}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SkyRLMegatronError):
            raise error.cause from None
        raise
