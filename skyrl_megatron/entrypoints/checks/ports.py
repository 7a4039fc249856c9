"""Ports that the configuration names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from skyrl_megatron.entrypoints.checks.planned_run import NotChecked, PlannedRun
from skyrl_megatron.errors import Problem


def ports(run: PlannedRun) -> Iterator[Problem | NotChecked]:
    """Yield the ports of the endpoint and the registry that cannot be listened on."""
    engine, cluster = run.cfg.generator.inference_engine, os.environ.get("RAY_ADDRESS", "")
    listeners = (
        (engine.enable_http_endpoint, "http_endpoint_port", engine.http_endpoint_host, engine.http_endpoint_port),
        (engine.enable_registry, "registry_port", engine.registry_host, engine.registry_port),
    )
    for enabled, name, host, port in listeners:
        if not (enabled and port):
            continue
        key = f"generator.inference_engine.{name}"
        if cluster:
            yield NotChecked(f"{key}={port}", "the run's process may be on another node of the cluster")
        elif why := _cannot_listen(host, port):
            yield Problem(key, port, f"cannot listen on {host} ({why}): set another port, or 0 for a free one")
    if engine.enable_registry and not run.training:
        fix = "engines that join wait for a trainer's weights, and there is none: set it to false"
        yield Problem("generator.inference_engine.enable_registry", True, fix)
    if cluster:
        yield NotChecked("the cluster", "whether this environment is on its nodes shows when it is joined")


def _cannot_listen(host: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
