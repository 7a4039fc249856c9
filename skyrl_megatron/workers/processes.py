"""Ports, environment variables and the fork server of a run's processes. Imports no Ray.

Ray writes a ``runtime_env`` into logs that everybody can read and into the arguments of processes, so that none of the
user's variables is in one: any of them may be a credential, whatever its name. The workers of a Ray of our own inherit
them from the process that starts it; those of a cluster that was joined set them themselves, from the memory of
Ray's head (:func:`joined_environment`).

On GPUs processes import for themselves, each on cores of its own: a node has ten of them for every GPU, and nothing
that sets up CUDA may come before a fork. Nodes of a cluster that was joined have no server either.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from skyrl_megatron import device, fork_server
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.inference.vllm import processes

LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port of ``host``, an address of this machine, that nobody listens on. Raises LaunchError when there
    is none, or the address is not this machine's."""
    with take_port(host) as holder:
        return int(holder.getsockname()[1])


def take_port(host: str = LOOPBACK) -> socket.socket:
    """Return a socket that holds a free TCP port of ``host``, so that nobody else gets it before it is listened on.
    Raises LaunchError as :func:`free_port` does."""
    holder = socket.socket()
    try:
        holder.bind((host, 0))
    except OSError as error:
        holder.close()
        raise LaunchError(
            f"no free port on {host}: {error}; end processes that hold ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range; an address that is not this machine's is Ray's idea of it: start Ray with "
            "--node-ip-address"
        ) from error
    return holder


FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "MLFLOW_", "SWANLAB_", "VLLM_", "SKYRL_"),
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NVTE_"),
)
"""Variables of the user that reach the actors of a cluster that was joined."""
DEFAULT_THREADS = "SKYRL_DEFAULT_THREADS"
"""Set where the value of ``OMP_NUM_THREADS`` is a default of this project and not the user's."""


def worker_environment() -> dict[str, str]:
    """Return what every actor is started with, which Ray may write down: one thread per process unless the user set
    it, and what must be known before the first import."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **({} if user_sets_threads() else {DEFAULT_THREADS: "1"}),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", ""),
    }


def user_sets_threads() -> bool:
    """Return whether ``OMP_NUM_THREADS`` is what the user set."""
    return "OMP_NUM_THREADS" in os.environ and DEFAULT_THREADS not in os.environ


def forwarded() -> dict[str, str]:
    """Return the variables of the user that actors need: credentials, and where and how libraries work."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}


def joined_environment() -> dict[str, Any]:
    """Return the ``runtime_env`` of a job in a cluster that was joined: every worker of it, the user's own tasks'
    included, sets what is :func:`forwarded`, and what its own node has to compile kernels, before it imports anything
    for its task. Ray hands the function over as it does those of tasks, through the memory of its head."""
    variables = forwarded()

    def set_variables() -> None:
        os.environ.update(variables)
        with contextlib.suppress(ImportError):  # a node without this package: node_check.py says so
            from skyrl_megatron import device

            os.environ.update(device.compiler_environment())

    return {"env_vars": worker_environment(), "worker_process_setup_hook": set_variables}


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
