"""The inference engines of a run and their client: started on their allocation or found at their URLs, and watched."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from skyrl_megatron.config.rules.fully_async import samples_repeatably
from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.fleet import Fleet
from skyrl_megatron.inference.health import HealthMonitor
from skyrl_megatron.inference.offer import wanted
from skyrl_megatron.inference.pool import EnginePool, EngineSlot
from skyrl_megatron.inference.protocol import ENGINE_KEY, InferenceEngine
from skyrl_megatron.inference.vllm.engine import VLLMEngine
from skyrl_megatron.inference.vllm.remote import RemoteEngine
from skyrl_megatron.inference.vllm.settings import engine_settings
from skyrl_megatron.plugins import ENGINES
from skyrl_megatron.workers.engine_actor import RayEngine
from skyrl_megatron.workers.placement import RAY

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.inference.http_server import HttpServer
    from skyrl_megatron.workers.placement import BundleAllocation

STOP_TIMEOUT_S = 60.0
log = logging.getLogger(__name__)


class InferenceEngineClient(InferenceClient):
    """The client of a run's engines, which it starts and stops. Coroutines belong to one event loop; :meth:`stop` may
    run anywhere.

    ``allocation``: where engines are started; None when ``run_engines_locally`` is off.
    """

    def __init__(self, cfg: SkyRLTrainConfig, allocation: BundleAllocation | None) -> None:
        self.cfg, self.settings = cfg, engine_settings(cfg)
        made = _started(cfg, allocation) if allocation is not None else _elsewhere(cfg)
        pool = EnginePool(made, wait_s=cfg.trainer.phase_timeout_s)
        super().__init__(pool, deterministic=samples_repeatably(cfg))
        self._endpoint: HttpServer | None = None
        self._registry: HttpServer | None = None
        self.fleet: Fleet | None = None
        """Engines that join while the run goes; None where none may."""
        self.say: Callable[[str], None] = log.warning
        """Prints a line about engines that come and go."""

    @property
    def dtype(self) -> str:
        """Dtype of the engines' weights."""
        return self.settings.dtype

    @property
    def endpoint_url(self) -> str | None:
        """``http://host:port`` of the HTTP endpoint; None when there is none."""
        return None if self._endpoint is None else self._endpoint.url

    async def start(self) -> None:
        """Start all engines, the HTTP endpoint and the registry if they are configured, and wait for the engines that
        must have joined.

        Raises EngineError that quotes the engine that failed, LaunchError when a port is taken or engines are missing.
        """
        await self.pool.start()
        if self.cfg.generator.inference_engine.enable_http_endpoint:
            await self._serve()
        if self.cfg.generator.inference_engine.enable_registry:
            await self._open_registry()

    async def watch(self, sync_engine: Callable[[EngineSlot], Awaitable[None]]) -> None:
        """Restart engines that die or hang, and bring those that join up to date, from now on; see
        :class:`HealthMonitor` and :class:`Fleet`."""
        health_monitor(self.cfg, self.pool, sync_engine).start()
        if self.fleet is not None:
            self.fleet.sync_engine = sync_engine

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

    async def _serve(self) -> None:
        from skyrl_megatron.inference.http import build_app
        from skyrl_megatron.inference.http_server import HttpServer, endpoint_token

        engine = self.cfg.generator.inference_engine
        path = Path(engine.http_token_path or run_folder(self.cfg) / "http_token").expanduser()
        model, held = self.settings.served_model_name or self.settings.model, self.settings.adapters
        names = tuple(filter(None, held.names)) if held else ()
        app = build_app(self, model, endpoint_token(path), adapters=names)
        self._endpoint = HttpServer(app, engine.http_endpoint_host, engine.http_endpoint_port)
        await self._endpoint.start()
        self.say(f"endpoint: {self._endpoint.url}/v1 (OpenAI API), bearer token in {path}")

    async def _open_registry(self) -> None:
        from skyrl_megatron.inference.http_server import HttpServer, endpoint_token
        from skyrl_megatron.inference.registry import build_registry

        engine, settings = self.cfg.generator.inference_engine, self.settings
        path = Path(engine.registry_token_path or run_folder(self.cfg) / "registry_token").expanduser()
        self.fleet = Fleet(
            self.pool,
            wanted(settings),
            silence_s=engine.registry_silence_s,
            drain_s=engine.registry_drain_s,
            timeout_s=self.cfg.trainer.phase_timeout_s,
            weights_from=ray.util.get_node_ip_address() if ray.is_initialized() else None,
            say=lambda line: self.say(line),
        )
        app = build_registry(self.fleet, endpoint_token(path, "registry_token_path"))
        key = "generator.inference_engine.registry_port"
        self._registry = HttpServer(app, engine.registry_host, engine.registry_port, key)
        await self._registry.start()
        self.fleet.start()
        self.say(f"registry: {self._registry.url}, token in {path}")
        try:
            async with asyncio.timeout(self.cfg.trainer.phase_timeout_s):
                await self.pool.until_joined(engine.registry_min_engines)
        except TimeoutError:
            joined = sum(slot.joined for slot in self.pool.slots)
            raise LaunchError(
                f"generator.inference_engine.registry_min_engines={engine.registry_min_engines}: {joined} joined at "
                f"{self._registry.url} within {self.cfg.trainer.phase_timeout_s:g} s (trainer.phase_timeout_s): start "
                "them (python -m skyrl_megatron.entrypoints.serve_engine), or lower it"
            ) from None


def health_monitor(
    cfg: SkyRLTrainConfig, pool: EnginePool, sync_engine: Callable[[EngineSlot], Awaitable[None]]
) -> HealthMonitor:
    """Make what looks after the engines of a run."""
    often = cfg.generator.inference_engine.restarts_per_hour
    return HealthMonitor(pool, restarts_per_hour=often, sync_engine=sync_engine)


def _started(cfg: SkyRLTrainConfig, allocation: BundleAllocation) -> list[Callable[[], InferenceEngine]]:
    logs, made = run_folder(cfg) / "workers", []
    kind: Any = ENGINES.find(cfg.generator.inference_engine.backend) or VLLMEngine
    for number in range(cfg.generator.inference_engine.num_engines):
        settings = engine_settings(cfg, log_file=logs / f"engine_{number}.log")
        environment = allocation.engine_environment(number, settings.workers)
        if settings.distributed_executor_backend == RAY:
            executor = allocation.engine_executor(number, settings.workers)
            settings = replace(settings, distributed_executor_backend=executor)
        options = allocation.options(number, settings.workers)
        made.append(partial(RayEngine, settings, kind=kind, environment=environment, **options))
    return cast("list[Callable[[], InferenceEngine]]", made)


def _elsewhere(cfg: SkyRLTrainConfig) -> list[Callable[[], InferenceEngine]]:
    """List the servers named by URL. A proxy alone stands for one server."""
    engine = cfg.generator.inference_engine
    proxy = engine.external_proxy_url
    urls = engine.external_server_urls or engine.remote_urls or ([proxy] if proxy else [])
    timeout = cfg.trainer.phase_timeout_s
    key = os.environ.get(ENGINE_KEY)
    return [partial(RemoteEngine, url, proxy_url=proxy, timeout_s=timeout, key=key) for url in urls]
