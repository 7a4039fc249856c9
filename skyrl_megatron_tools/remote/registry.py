"""The registry of a run: an HTTP server over which engines that were started elsewhere join and leave.

| request | purpose |
|---|---|
| ``POST /engines/check`` | check whether an engine with this model and these packages may join; return requirements |
| ``POST /engines`` | join, with a ``JoinRequest`` |
| ``GET /engines`` | list all engines and their states |
| ``PUT /engines/NAME`` | heartbeat; return the engine's state |
| ``DELETE /engines/NAME`` | leave; answered when the engine is not needed any more |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import EngineError, LaunchError, RequestError
from skyrl_megatron_agents.http_endpoint import HttpServer, endpoint_token, error_response, guarded_app, json_body
from skyrl_megatron_tools.remote.fleet import Fleet, FleetMember, JoinRequest, checked, engine_requirements

if TYPE_CHECKING:
    from skyrl_megatron.workers.engines import InferenceEngineClient

_PORT = "generator.inference_engine.registry_port"


class EngineRegistry:
    """The registry of a run with ``generator.inference_engine.enable_registry``, and the fleet that joins over it."""

    def __init__(self, client: InferenceEngineClient) -> None:
        self.client, self.cfg = client, client.cfg
        self.fleet: Fleet | None = None
        self.server: HttpServer | None = None
        self.url: str | None = None

    async def start(self) -> None:
        """Serve, and wait for the ``registry_min_engines`` engines that the run needs to begin.

        Raises LaunchError if the port is in use, or if too few engines join within ``trainer.phase_timeout_s``.
        """
        engine = self.cfg.generator.inference_engine
        path = Path(engine.registry_token_path or run_folder(self.cfg) / "registry_token").expanduser()
        self.fleet = Fleet(
            self.client.pool,
            engine_requirements(self.client.settings),
            silence_s=engine.registry_silence_s,
            drain_s=engine.registry_drain_s,
            timeout_s=self.cfg.trainer.phase_timeout_s,
            weights_from=ray.util.get_node_ip_address() if ray.is_initialized() else None,
            say=lambda line: self.client.say(line),
        )
        app = build_registry(self.fleet, endpoint_token(path, "registry_token_path"))
        self.server = HttpServer(app, engine.registry_host, engine.registry_port, _PORT)
        await self.server.start()
        self.url = self.server.url
        self.fleet.start()
        self.client.say(f"registry: {self.url}, token in {path}")
        await self._wait_for_engines(engine.registry_min_engines)

    async def _wait_for_engines(self, count: int) -> None:
        timeout_s, pool = self.cfg.trainer.phase_timeout_s, self.client.pool
        try:
            async with asyncio.timeout(timeout_s):
                await pool.until_joined(count)
        except TimeoutError:
            joined = sum(slot.joined for slot in pool.slots)
            raise LaunchError(
                f"generator.inference_engine.registry_min_engines={count}: {joined} joined at {self.url} within "
                f"{timeout_s:g} s (trainer.phase_timeout_s): start more (skyrl-megatron serve-engine), or lower it"
            ) from None


def build_registry(fleet: Fleet, token: str) -> FastAPI:
    """Build the application. Every request except ``GET /health`` needs ``Authorization: Bearer <token>``.

    Status codes: 401 without the token, 400 for an invalid body, 409 with the reason if an engine cannot join, 404 for
    an unknown engine.
    """
    app = guarded_app(token)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"published": fleet.pool.published})

    @app.post("/engines/check")
    async def check(request: Request) -> Response:
        async def answer() -> Response:
            body = checked(await json_body(request), {"model": dict, "versions": dict})
            if problems := fleet.requirements.incompatibilities(**body):
                return error_response(409, "; ".join(problems))
            required = fleet.requirements
            return JSONResponse(
                {
                    "dtype": required.dtype,
                    "max_model_len": required.max_model_len,
                    "served_model_name": required.served_model_name,
                }
            )

        return await _answer(answer())

    @app.post("/engines")
    async def join(request: Request) -> Response:
        async def answer() -> Response:
            member = await fleet.join(JoinRequest.of(await json_body(request)))
            return JSONResponse(_view(fleet, member) | {"heartbeat_s": fleet.heartbeat_s}, 201)

        return await _answer(answer())

    @app.get("/engines")
    async def engines() -> Response:
        return JSONResponse({"published": fleet.pool.published, "engines": fleet.describe()})

    @app.put("/engines/{name}")
    async def heartbeat(name: str) -> Response:
        try:
            return JSONResponse(_view(fleet, fleet.heartbeat(name)))
        except KeyError:
            return _unknown(name)

    @app.delete("/engines/{name}")
    async def leave(name: str) -> Response:
        try:
            return JSONResponse(_view(fleet, await fleet.leave(name)))
        except KeyError:
            return _unknown(name)

    return app


async def _answer(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except RequestError as error:
        return error_response(400, str(error))
    except EngineError as error:
        return error_response(409, str(error))


def _view(fleet: Fleet, member: FleetMember) -> dict[str, Any]:
    slot = member.slot
    return {
        "engine": member.name,
        "state": member.state,
        "version": slot.version,
        "published": fleet.pool.published,
        "answered": slot.answered,
        "moved": member.moved,
        "why": slot.why,
    }


def _unknown(name: str) -> Response:
    return error_response(404, f"no engine {name} has joined this run")
