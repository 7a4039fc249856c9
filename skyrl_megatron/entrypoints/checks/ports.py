"""Ports that the configuration names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem


def ports(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield the endpoint's port if it cannot be listened on."""
    engine, cluster = run.cfg.generator.inference_engine, os.environ.get("RAY_ADDRESS", "")
    host, port = engine.http_endpoint_host, engine.http_endpoint_port
    if engine.enable_http_endpoint and port:
        key = "generator.inference_engine.http_endpoint_port"
        if cluster:
            yield NotChecked(f"{key}={port}", "the run's process may be on another node of the cluster")
        elif why := _cannot_listen(host, port):
            yield Problem(key, port, f"cannot listen on {host} ({why}): set another port, or 0 for a free one")
    if cluster:
        yield NotChecked("the cluster", "whether this environment is on its nodes shows when it is joined")


def _cannot_listen(host: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
