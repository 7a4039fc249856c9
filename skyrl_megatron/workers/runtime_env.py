"""Ports, environment variables and the fork server of a run's processes. Does not import Ray.

Ray writes a ``runtime_env`` into world-readable logs and into process arguments. So it must not contain the user's
variables, any of which may be a credential. Workers of a local Ray inherit them from the process that starts Ray.
Workers of a joined cluster set them from a function in the memory of Ray's head (:func:`joined_environment`).

On CPU, a fork server imports the packages once for all processes. On GPUs each process imports them itself: there are
enough cores, and CUDA must not be initialized before a fork. Nodes of a joined cluster have no fork server either.
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
    """Return a free TCP port of ``host``. Raises LaunchError if there is none or ``host`` is not a local address."""
    with take_port(host) as holder:
        return int(holder.getsockname()[1])


def take_port(host: str = LOOPBACK) -> socket.socket:
    """Return a socket that reserves a free TCP port of ``host``. Raises LaunchError as :func:`free_port`."""
    holder = socket.socket()
    try:
        holder.bind((host, 0))
    except OSError as error:
        holder.close()
        raise LaunchError(
            f"no free port on {host}: {error}; end processes that use ports (ss -ltn), or widen "
            "net.ipv4.ip_local_port_range; if this is not an address of this machine, start Ray with --node-ip-address"
        ) from error
    return holder


FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "MLFLOW_", "SWANLAB_", "VLLM_", "SKYRL_"),
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NVTE_"),
)
"""Prefixes of the user's variables that are passed to actors of a joined cluster."""
DEFAULT_THREADS = "SKYRL_DEFAULT_THREADS"
"""Set if ``OMP_NUM_THREADS`` is this project's default and not the user's value."""


def worker_environment() -> dict[str, str]:
    """Return the variables of every actor that must be set before its first import. Ray may log them."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **({} if user_sets_threads() else {DEFAULT_THREADS: "1"}),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", ""),
    }


def user_sets_threads() -> bool:
    """Return whether the user has set ``OMP_NUM_THREADS``."""
    return "OMP_NUM_THREADS" in os.environ and DEFAULT_THREADS not in os.environ


def forwarded() -> dict[str, str]:
    """Return the user's variables that actors need: credentials and settings of libraries."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}


def joined_environment() -> dict[str, Any]:
    """Return the ``runtime_env`` of a job in a joined cluster.

    Every worker of the job first sets the :func:`forwarded` variables and those that its node needs to compile
    kernels. Ray passes this setup function through the memory of its head, as it does for tasks.
    """
    variables = forwarded()

    def set_variables() -> None:
        os.environ.update(variables)
        with contextlib.suppress(ImportError):  # nodes.check_nodes reports a node without this package
            from skyrl_megatron import device

            os.environ.update(device.compiler_environment())

    return {"env_vars": worker_environment(), "worker_process_setup_hook": set_variables}


log = logging.getLogger(__name__)
_server: fork_server.ForkServer | None = None


def start_server() -> None:
    """Start the fork server of this process's run, unless it runs already or the run uses none. Return immediately.

    A command calls this first, so that the server imports while the command does other work.
    """
    global _server
    if _server is None and not os.environ.get("RAY_ADDRESS") and device.driver_gpu_count() == 0:
        _server = fork_server.ForkServer.start(f"{__name__}:import_all", server_environment())


def server_environment() -> dict[str, str]:
    """Return the server's environment: variables of actors that are only read when a library is loaded."""
    return {**os.environ, **worker_environment(), "LD_PRELOAD": processes.libraries()}


def runtime_environment(variables: Mapping[str, str], *, serving: bool = False) -> dict[str, Any]:
    """Return the ``runtime_env`` of an actor that the fork server starts, with these variables.

    ``serving``: the actor starts vLLM's processes.
    """
    environment: dict[str, Any] = {"env_vars": dict(variables)}
    if _server is None:
        return environment
    if not _server.is_alive():
        log.warning(
            "the fork server ended (%s): the run's processes start without it, and slower", _server.last_line()
        )
        return environment
    return environment | {"py_executable": fork_server.command(_server, serving=serving)}


def import_all() -> None:
    """Import what ranks, engine actors and vLLM's processes need, except Ray, and without touching a GPU.

    Ray reads its environment when it is loaded, which differs between workers. Libraries that ask torch for GPUs would
    initialize the driver, unless no GPU is visible and torch uses NVML.
    """
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM then treats Ray as not installed
    try:
        # read when Megatron decorates functions, which must not be compiled on CPU (RankProcess.load)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        importlib.import_module("skyrl_megatron.runtime.engine")
        del os.environ["TORCHDYNAMO_DISABLE"]
        processes.import_all()
    finally:
        del sys.modules["ray"]
