"""The inference engines of a run as Ray actors, and the client that starts them and samples from them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron.config.resolve import is_reproducible, run_folder
from skyrl_megatron.errors import EngineError, EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.client import HealthMonitor, InferenceClient
from skyrl_megatron.inference.engine_pool import EnginePool, EngineSlot
from skyrl_megatron.inference.protocol import ENGINE_KEY, Generation, InferenceEngine, OpenAIAnswer, SampleRequest
from skyrl_megatron.inference.vllm.processes import use_private_temporary_folder
from skyrl_megatron.inference.vllm.settings import engine_settings
from skyrl_megatron.inference.vllm.vllm_engine import EngineSettings, VLLMEngine
from skyrl_megatron.plugins import ENGINE_SERVICES, ENGINES, REMOTE_ENGINES
from skyrl_megatron.types import ByLayer, StoredArray
from skyrl_megatron.workers.actor_group import ACTOR_LOST, lost_because, unpickled_line
from skyrl_megatron.workers.dispatch import RayArray, layer_groups
from skyrl_megatron.workers.placement import RAY
from skyrl_megatron.workers.runtime_env import runtime_environment

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.placement import BundleAllocation


type StageLayers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """The arrays of a sample that are results of their own: routed experts, and the ids of its sampling support."""

    layers: tuple[StageLayers, ...]
    """Layers of each array of routed experts; those of no group are in the first one. ``((),)``: all in one array.
    Empty: the engine returns no experts."""
    support: bool

    @property
    def count(self) -> int:
        """Number of arrays."""
        return len(self.layers) + self.support

    def split(self, generation: Generation) -> tuple[Any, ...]:
        """Return a generation with what :meth:`joined` needs in place of its arrays, and these; None where there is
        none."""
        arrays: list[Any] = [None] * self.count
        about, routes, support = None, generation.routed_experts, generation.support
        if routes is not None and self.layers:
            groups = layer_groups(self.layers, routes.shape[1])
            about = (routes.shape, routes.dtype.str, groups)
            for number, layers in enumerate(groups):
                arrays[number] = np.ascontiguousarray(routes[:, list(layers)])
            if not groups:
                arrays[0] = np.ascontiguousarray(routes)
        # A token outside of its support is an error, which names the row where it is (``data/batch.py``).
        if support is not None and self.support and support.without(np.asarray(generation.token_ids)) is None:
            arrays[-1] = np.ascontiguousarray(support.ids)
            support = replace(support, ids=(len(support.ids), support.ids.dtype.str))
        return replace(generation, routed_experts=about, support=support), *arrays

    def joined(self, generation: Generation, references: Sequence[Any]) -> Generation:
        """Return the generation with arrays that are fetched when they are read."""
        routes, support = generation.routed_experts, generation.support
        stored = [RayArray(reference) for reference in references]
        if routes is not None:
            (length, *rest), dtype, groups = routes
            source = ByLayer(groups, tuple(stored[: len(groups)])) if groups else stored[0]
            routes = StoredArray([(source, 0, length)], rest, np.dtype(dtype))
        if support is not None and isinstance(support.ids, tuple):
            length, dtype = support.ids
            support = replace(support, ids=StoredArray([(stored[-1], 0, length)], (), np.dtype(dtype)))
        return replace(generation, routed_experts=routes, support=support)


_SAMPLING = frozenset({"generate", "generate_batch", "score"})
"""Calls that are cancelled in the actor when their caller is cancelled."""
KILL_TIMEOUT_S = 20
"""Deadline for killing an engine's processes on another host."""


def engine_actor(kind: type[InferenceEngine]) -> Any:
    """Return a Ray actor class with the methods of an engine class."""

    class EngineActor(kind):  # type: ignore[misc, valid-type]
        """``environment``: variables of this engine's processes, set before any GPU is used."""

        def __init__(self, settings: EngineSettings, environment: Mapping[str, str]) -> None:
            os.environ.update(environment)
            _start_tracker(use_private_temporary_folder())
            super().__init__(settings)

        async def start(self) -> None:
            await super().start()
            gc.collect()
            gc.freeze()  # keep permanent objects out of the garbage collections during requests

        async def generate_apart(self, apart: Apart, *request: Any) -> tuple[Any, ...]:
            """Sample one continuation, and return its arrays as results of their own."""
            return apart.split(await self.generate(*request))

        async def generate_batch_apart(self, apart: Apart, requests: Sequence[SampleRequest]) -> tuple[Any, ...]:
            """Sample all requests, and return the arrays of each as results of their own."""
            split = [apart.split(generation) for generation in await self.generate_batch(requests)]
            return [generation for generation, *_ in split], *(array for _, *arrays in split for array in arrays)

        def process_ids(self) -> list[int]:
            """List the ids of the actor's process and the engine's processes."""
            return [os.getpid(), *getattr(super(), "process_ids", list)()]

        def node_id(self) -> str:
            """Return Ray's id of the node."""
            return str(ray.get_runtime_context().get_node_id())

    return ray.remote(num_cpus=1, max_concurrency=4096)(EngineActor)


class RayEngine:
    """The ``InferenceEngine`` that forwards every method to an actor.

    A lost actor raises EngineGoneError. An error of this package inside the actor keeps its type.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        kind: type[InferenceEngine] = VLLMEngine,
        environment: Mapping[str, str] | None = None,
        stages: Sequence[StageLayers] = (),
        **options: Any,
    ) -> None:
        """``kind``: engine class. ``environment``: variables of the engine's processes. ``stages``: layers whose
        experts each pipeline stage of the ranks replays, which may be filled later. ``options``: Ray options of the
        actor, such as ``num_cpus`` or ``scheduling_strategy``."""
        options = {"runtime_env": runtime_environment({}, serving=True)} | options
        self.actor = engine_actor(kind).options(**options).remote(settings, environment or {})
        self._routed = bool(getattr(settings, "enable_return_routed_experts", False))
        self._supported, self._stages = bool(getattr(settings, "return_support", False)), stages
        self._node = ""
        self._processes: list[int] = []

    async def start(self) -> None:
        await self._call("start")
        self._processes, self._node = await self._call("process_ids"), await self._call("node_id")

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return self._call(name, *args, **kwargs)

        return call

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        request = (request_id, prompt_token_ids, sampling, adapter)
        if not (apart := self._apart()).count:
            return cast("Generation", await self._call("generate", *request))
        generation, arrays = await self._sampled_apart("generate_apart", apart.count, apart, *request)
        return apart.joined(generation, arrays)

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        count = (apart := self._apart()).count
        if not count:
            return cast("list[Generation]", await self._call("generate_batch", requests))
        total = count * len(requests)
        generations, arrays = await self._sampled_apart("generate_batch_apart", total, apart, requests)
        return [apart.joined(one, arrays[n * count : (n + 1) * count]) for n, one in enumerate(generations)]

    def _apart(self) -> Apart:
        stages = tuple(self._stages) if len(self._stages) > 1 else ((),)
        return Apart(stages if self._routed else (), self._supported)

    async def _sampled_apart(self, name: str, count: int, *arguments: Any) -> tuple[Any, list[Any]]:
        """Return what an actor's method sampled, and references to its ``count`` arrays.

        They are results of a call, which this process owns: they stay when the actor ends. It does not fetch them.
        """
        answer, *arrays = getattr(self.actor, name).options(num_returns=1 + count).remote(*arguments)
        try:
            with _lost_actors():
                return await answer, arrays
        except asyncio.CancelledError:
            _cancel(answer)
            raise

    async def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        answer = self.actor.openai.remote(path, body)
        try:
            with _lost_actors():
                async for piece in answer:
                    yield await piece
        except (asyncio.CancelledError, GeneratorExit):
            _cancel(answer)  # the rest is not needed
            raise

    async def shutdown(self) -> None:
        await self._call("shutdown")
        ray.kill(self.actor)

    async def kill(self) -> None:
        """Kill the actor and the engine's processes. A stopped one (SIGSTOP) would not end with its parent."""
        if self._node == ray.get_runtime_context().get_node_id():
            _kill(self._processes)
        elif self._processes:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # the host may be gone
                await asyncio.wait_for(_kill_on(self._node, self._processes), KILL_TIMEOUT_S)
        ray.kill(self.actor)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.actor, name).remote(*args, **kwargs)
        try:
            with _lost_actors():
                return await answer
        except asyncio.CancelledError:
            if name in _SAMPLING:
                _cancel(answer)  # the actor would continue
            raise


def _cancel(answer: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):  # the actor may be gone
        ray.cancel(answer)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


async def _kill_on(node: str, processes: Sequence[int]) -> None:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    await ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=there).remote(processes)


def _start_tracker(folder: str | None) -> None:
    """Start multiprocessing's resource tracker as a detached process, which also removes ``folder`` at its end.

    The tracker frees shared memory and semaphores of killed processes. Ray kills an actor's child processes, so a
    tracker that is a child would not free them.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    reader, writer = os.pipe()
    tracks = f"import shutil; from multiprocessing.resource_tracker import main; main({reader}); "
    tracks += f"{folder!r} and shutil.rmtree({folder!r}, ignore_errors=True)"
    starts = f"import subprocess, sys; subprocess.Popen([*sys.argv[1:], '-c', {tracks!r}], pass_fds=[{reader}])"
    python = [sys.executable, "-I", "-S"]
    try:
        subprocess.run(
            [*python, "-c", starts, *python], pass_fds=[reader], check=True, timeout=60, start_new_session=True
        )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    tracker._fd = writer  # as in a spawned process, which uses its parent's tracker


@contextlib.contextmanager
def _lost_actors() -> Iterator[None]:
    try:
        yield
    except ACTOR_LOST as error:
        raise EngineGoneError(f"the engine's actor died: {lost_because(error)}") from error
    except ray.exceptions.UnserializableException as error:
        raise EngineError(f"the engine's actor failed: {unpickled_line(error)}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SkyRLMegatronError):
            raise error.cause from None
        raise


STOP_TIMEOUT_S = 60.0
log = logging.getLogger(__name__)


class EngineService(Protocol):
    """What a run serves next to its engines, made with their client: a class of ``plugins.ENGINE_SERVICES``."""

    url: str | None
    """``http://host:port``; None until it is started."""

    async def start(self) -> None:
        """Serve, on the event loop of the engines. Raises LaunchError if it cannot."""


class InferenceEngineClient(InferenceClient):
    """The client of a run's engines, which it starts and stops.

    Its coroutines must run on one event loop; :meth:`stop` may run in any thread. ``allocation``: where engines run;
    None if ``run_engines_locally`` is off. Raises ConfigError for an address or a service that no plugin serves.
    """

    def __init__(self, cfg: SkyRLTrainConfig, allocation: BundleAllocation | None) -> None:
        self.cfg, self.settings = cfg, engine_settings(cfg)
        self.stages: list[StageLayers] = []
        """Layers whose experts each pipeline stage of the policy replays, once its ranks are built."""
        engines = _started(cfg, allocation, self.stages) if allocation is not None else _elsewhere(cfg)
        pool = EnginePool(engines, wait_s=cfg.trainer.phase_timeout_s)
        super().__init__(pool, deterministic=is_reproducible(cfg))
        engine = cfg.generator.inference_engine
        switches = {"enable_http_endpoint": engine.enable_http_endpoint, "enable_registry": engine.enable_registry}
        self.services: dict[str, EngineService] = {
            key: ENGINE_SERVICES.require(key)(self) for key, is_on in switches.items() if is_on
        }
        """The services that the configuration turns on, by the key that does."""
        self.say: Callable[[str], None] = log.warning
        """Prints a line about a service, or about engines that join or leave."""

    @property
    def dtype(self) -> str:
        """Dtype of the engines' weights."""
        return self.settings.dtype

    @property
    def endpoint_url(self) -> str | None:
        """``http://host:port`` of the HTTP endpoint; None if it is off."""
        endpoint = self.services.get("enable_http_endpoint")
        return None if endpoint is None else endpoint.url

    async def start(self) -> None:
        """Start all engines, then the services.

        Raises EngineError with the error of an engine, and LaunchError if a port is in use or engines are missing.
        """
        await self.pool.start()
        for service in self.services.values():
            await service.start()

    async def watch(self, sync_engine: Callable[[EngineSlot], Awaitable[None]]) -> None:
        """Start the :class:`HealthMonitor`, and let engines that join get the published weights."""
        self.pool.sync_engine = sync_engine
        health_monitor(self.cfg, self.pool, sync_engine).start()

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


def health_monitor(
    cfg: SkyRLTrainConfig, pool: EnginePool, sync_engine: Callable[[EngineSlot], Awaitable[None]]
) -> HealthMonitor:
    """Return the health monitor of a run's engines."""
    limit = cfg.generator.inference_engine.restarts_per_hour
    return HealthMonitor(pool, restarts_per_hour=limit, sync_engine=sync_engine)


def _started(
    cfg: SkyRLTrainConfig, allocation: BundleAllocation, stages: Sequence[StageLayers]
) -> list[Callable[[], InferenceEngine]]:
    logs, made = run_folder(cfg) / "workers", []
    kind: Any = ENGINES.find(cfg.generator.inference_engine.backend) or VLLMEngine
    for number in range(cfg.generator.inference_engine.num_engines):
        settings = engine_settings(cfg, log_file=logs / f"engine_{number}.log")
        environment = allocation.engine_environment(number, settings.workers)
        if settings.distributed_executor_backend == RAY:
            executor = allocation.engine_executor(number, settings.workers)
            settings = replace(settings, distributed_executor_backend=executor)
        options = allocation.options(number, settings.workers)
        made.append(partial(RayEngine, settings, kind=kind, environment=environment, stages=stages, **options))
    return cast("list[Callable[[], InferenceEngine]]", made)


def _elsewhere(cfg: SkyRLTrainConfig) -> list[Callable[[], InferenceEngine]]:
    """List the configured remote servers. A proxy without servers counts as one server."""
    engine = cfg.generator.inference_engine
    proxy = engine.external_proxy_url
    urls = engine.external_server_urls or engine.remote_urls or ([proxy] if proxy else [])
    timeout = cfg.trainer.phase_timeout_s
    key = os.environ.get(ENGINE_KEY)
    return [partial(_remote_kind(url), url, proxy_url=proxy, timeout_s=timeout, key=key) for url in urls]


def _remote_kind(url: str) -> Callable[..., InferenceEngine]:
    """Return the class of the engine at an address. One without a scheme (``host:port``) is of HTTP."""
    scheme, separator, _ = url.partition("://")
    return REMOTE_ENGINES.require(scheme if separator else "http")
