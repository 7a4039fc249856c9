"""The registry of a run, over HTTP: where engines that were started elsewhere join and leave.

| | |
|---|---|
| ``POST /engines/check`` | may an engine of this model and these packages join; what the run asks of it |
| ``POST /engines`` | join, with an ``Offer`` |
| ``GET /engines`` | all engines and their states |
| ``PUT /engines/NAME`` | a sign of life; answers with the engine's state |
| ``DELETE /engines/NAME`` | leave; answers once nothing needs the engine any more |
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from skyrl_megatron.errors import EngineError, RequestError
from skyrl_megatron.inference.fleet import Fleet, FleetMember
from skyrl_megatron.inference.http_guard import guarded, json_of, refusal
from skyrl_megatron.inference.offer import Offer, checked


def build_registry(fleet: Fleet, token: str) -> FastAPI:
    """Build the application. Every request needs ``Authorization: Bearer <token>``, but for ``GET /health``.

    Answers 401 without the token, 400 for a body that is no offer, 409 with the reason for an engine that cannot join,
    404 for one that never did.
    """
    app = guarded(token)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"published": fleet.pool.published})

    @app.post("/engines/check")
    async def check(request: Request) -> Response:
        async def answer() -> Response:
            offered = checked(await json_of(request), {"model": dict, "versions": dict})
            if problems := fleet.wanted.refusals(**offered):
                return refusal(409, "; ".join(problems))
            wanted = fleet.wanted
            return JSONResponse(
                {
                    "dtype": wanted.dtype,
                    "max_model_len": wanted.max_model_len,
                    "served_model_name": wanted.served_model_name,
                }
            )

        return await _answer(answer())

    @app.post("/engines")
    async def join(request: Request) -> Response:
        async def answer() -> Response:
            member = await fleet.join(Offer.of(await json_of(request)))
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
        return refusal(400, str(error))
    except EngineError as error:
        return refusal(409, str(error))


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
    return refusal(404, f"no engine {name} has joined this run")
