"""The fork server of a run on CPU: ranks and engine actors come from it, with all that they import. Imports no Ray.

On GPUs processes import for themselves, each on cores of its own: a node has ten of them for every GPU, and nothing
that sets up CUDA may come before a fork. Nodes of a cluster that was joined have no server either.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from skyrl_megatron import device, fork_server
from skyrl_megatron.inference.vllm import processes
from skyrl_megatron.workers.environment import worker_environment

log = logging.getLogger(__name__)
_server: fork_server.ForkServer | None = None


def start_server() -> None:
    """Start the server of this process's run, unless there is one or the run has none. Returns at once.

    What else the process does until its actors start costs no time: the first thing that a command does.
    """
    global _server
    if _server is None and not os.environ.get("RAY_ADDRESS") and device.driver_gpu_count() == 0:
        _server = fork_server.ForkServer.start(f"{__name__}:import_all", server_environment())


def server_environment() -> dict[str, str]:
    """Return the variables of the server: those of actors, which may read none of them otherwise."""
    return {**os.environ, **worker_environment(), "LD_PRELOAD": processes.libraries()}


def runtime_environment(variables: Mapping[str, str], *, serving: bool = False) -> dict[str, Any]:
    """Return the ``runtime_env`` of an actor with these variables, which has from the server what :func:`import_all`
    imports. ``serving``: the actor starts vLLM's processes."""
    found: dict[str, Any] = {"env_vars": dict(variables)}
    if _server is None:
        return found
    if not _server.is_alive():
        log.warning("the fork server ended (%s): processes of the run import for themselves", _server.said())
        return found
    return found | {"py_executable": fork_server.command(_server, serving=serving)}


def import_all() -> None:
    """Import what ranks, engine actors and vLLM's processes need, but for Ray; nothing may look for a GPU.

    Ray's library reads its environment when it is loaded, and a worker's names its node. Libraries that ask torch
    whether there is a GPU make it load and initialise the driver, unless none is visible and NVML is to be asked.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    sys.modules["ray"] = None  # type: ignore[assignment]  # as if it were not installed, where vLLM asks
    try:
        # read where functions are decorated: on CPU Megatron's are not to be compiled (RankProcess.load)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        importlib.import_module("skyrl_megatron.runtime.critic")  # and with it the engine of all roles
        del os.environ["TORCHDYNAMO_DISABLE"]
        processes.import_all()
    finally:
        del sys.modules["ray"]
