"""Start a local Ray, or join a cluster.

A local Ray listens on loopback, has a token that only its processes know, and ends with the run. If ``RAY_ADDRESS`` is
set (``auto``: the cluster of this machine), the run joins that cluster. As a program, this module prints the nodes of
the cluster at the given address as JSON, so that the caller needs no connection to Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import utils as ray_utils
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron import device
from skyrl_megatron.algorithms.registry import exchange_changes
from skyrl_megatron.config.hardware import gpu_type, lockable_bytes, own_memory
from skyrl_megatron.config.resolve import AnyConfig, typed_config
from skyrl_megatron.config.roles import active_roles, engine_ranks, role_world_size
from skyrl_megatron.errors import LaunchError
from skyrl_megatron.interrupts import hangups_blocked
from skyrl_megatron.workers.nodes import check_nodes
from skyrl_megatron.workers.ray_guard import guard_agents
from skyrl_megatron.workers.runtime_env import LOOPBACK, joined_environment, user_sets_threads, worker_environment

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronConfig, SkyRLTrainConfig

log = logging.getLogger(__name__)
SPARE_SLOTS = 4
"""Additional logical CPUs for entry points and environments that request one."""
CPU_STORE_BYTES = 1 << 30
START_ATTEMPTS = 2
"""Ray's own start timeout is 30 s, which is too short on a busy machine."""
CONNECT_TIMEOUT_S = 10.0
END_TIMEOUT_S = 30.0
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def rank_environment(cfg: SkyRLTrainConfig, role: str, threads: int = 1) -> dict[str, str]:
    """Return additional environment variables of a role's ranks on GPUs.

    ``threads``: a rank's share of its node's cores, for Adam on the host. The user's variables take precedence.
    Megatron overlaps communication with computation only with CUDA_DEVICE_MAX_CONNECTIONS=1
    (megatron/training/arguments.py). Engines do not get it, because it would serialize their streams. Expandable
    segments keep micro-batches of different lengths from leaving segments that no later tensor fits into; memory that
    other processes map is allocated without them (``device.fixed_segments``), and so are engines.
    """
    variables = {}
    if not any(os.environ.get(name) for name in device.ALLOCATOR_OPTIONS):
        variables[device.ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
    if not user_sets_threads():
        variables["OMP_NUM_THREADS"] = str(threads)
    if _orders_kernels(getattr(cfg.trainer, role).megatron_config):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return variables


def _orders_kernels(megatron: MegatronConfig) -> bool:
    degree = max(megatron.tensor_model_parallel_size, megatron.context_parallel_size)
    return degree > 1 or megatron.ddp_config.overlap_grad_reduce


def logical_slots(cfg: SkyRLTrainConfig) -> int:
    """Return the number of logical CPUs of a local Ray: one per rank and engine process, plus :data:`SPARE_SLOTS`."""
    ranks = sum(role_world_size(cfg.trainer.placement, role) for role in active_roles(cfg))
    engine = cfg.generator.inference_engine
    engines = engine.num_engines * engine_ranks(cfg) if engine.run_engines_locally else 0
    return ranks + engines + SPARE_SLOTS


def initialize_ray(cfg: AnyConfig, *, log_to_driver: bool = True) -> str:
    """Join the cluster at RAY_ADDRESS or start Ray locally, and exchange registered functions.

    If Ray is initialized already, only exchange the functions. ``cfg``: a validated configuration. ``log_to_driver``:
    print the output of actors and tasks here too; ranks print to log files. Returns a description of the Ray for the
    console. Raises LaunchError if Ray does not start or answer, or if a node cannot run this environment.
    """
    description = "already initialized"
    if not ray.is_initialized():
        cfg = typed_config(cfg)
        if address := os.environ.get("RAY_ADDRESS"):
            join(address, joined_environment(), show_output=log_to_driver)
            nodes = check_nodes([cfg.trainer.ckpt_path, cfg.trainer.export_path, cfg.trainer.log_path])
            description = f"joined {address}, {nodes}"
        else:
            slots = max(logical_slots(cfg), os.cpu_count() or 1) if device.has_cuda() else logical_slots(cfg)
            environment, store = {"env_vars": worker_environment()}, None if device.has_cuda() else CPU_STORE_BYTES
            _start(slots, environment, store, show_output=log_to_driver)
            description = "local, loopback, token"
    exchange_changes()
    return description


@contextlib.contextmanager
def local_ray(slots: int, *, object_store_bytes: int = 256 << 20) -> Iterator[None]:
    """Run a local Ray with ``slots`` logical CPUs during the block."""
    environment = {"env_vars": worker_environment() | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}}
    _start(slots, environment, object_store_bytes, show_output=bool(os.environ.get("SKYRL_WORKER_LOGS")))
    try:
        yield
    finally:
        end_ray()


def end_ray() -> None:
    """Shut a local Ray down, or leave the joined cluster.

    Ray waits for its processes without a timeout. After :data:`END_TIMEOUT_S`, stopped processes (SIGSTOP) of a local
    Ray are resumed; if there are none, its GCS is killed.
    """
    ending = threading.Thread(target=ray.shutdown, daemon=True, name="end of ray")
    ending.start()
    _join(ending)
    if not ending.is_alive():
        return
    ours = [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]
    stopped = [child for child in ours if child.status() == psutil.STATUS_STOPPED]
    names = ", ".join(child.name() for child in stopped)
    log.warning("Ray did not shut down within %g s%s", END_TIMEOUT_S, f": {names} was stopped" if names else "")
    for child in stopped:
        child.resume()
    for child in [] if stopped else [child for child in ours if child.name() == "gcs_server"]:
        child.kill()
    _join(ending)
    if ending.is_alive():
        log.warning("Ray's head does not answer: the run exits without shutting Ray down")
        error = sys.exception()
        atexit.register(_exit, 0 if error is None else getattr(error, "exit_code", 1))


def _join(ending: threading.Thread) -> None:
    """Wait for ``ray.shutdown`` for at most :data:`END_TIMEOUT_S`, and keep the SIGTERM handler.

    Ray's core worker sets SIGTERM to its default action when it ends (``RayLog::UninstallSignalAction``), of which
    Python knows nothing: the next SIGTERM would end the process without the code and the sentence of the command.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while ending.is_alive() and time.monotonic() < deadline:
        ending.join(0.002)
        _restore_sigterm()


def _restore_sigterm() -> None:
    """Set the handler of SIGTERM that Python has again. Outside the main thread this does nothing."""
    with contextlib.suppress(ValueError):
        if (handler := signal.getsignal(signal.SIGTERM)) is not None:
            signal.signal(signal.SIGTERM, handler)


def _exit(code: int) -> None:
    """Exit without Ray's exit handlers, which would wait again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(slots: int, environment: dict[str, Any], store_bytes: int | None, *, show_output: bool) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray lowers the priority of workers
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # such workers would lack the job's variables
    os.environ.update(device.compiler_environment())  # inherited by Ray's processes and actors
    for attempt in range(START_ATTEMPTS):
        try:
            with hangups_blocked(), _sigterm_kept():
                ray.init(
                    address="local",
                    num_cpus=slots,
                    include_dashboard=False,
                    object_store_memory=store_bytes,
                    log_to_driver=show_output,
                    logging_level=logging.ERROR,
                    runtime_env=environment,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=_short_temporary_folder(),
                )
            guard_agents()
            return
        except Exception as error:
            end_ray()
            if attempt + 1 == START_ATTEMPTS:
                raise LaunchError(f"Ray did not start on {LOOPBACK}: {_first_line(error)}") from error


RAY_CHARACTERS = 36
"""Limit of Ray's temporary folder: Ray appends up to 71 characters to it for its sockets, of 107 that Linux allows."""


def _short_temporary_folder() -> str | None:
    """Return Ray's usual folder if the path of ``TMPDIR``, which Ray uses instead, is too long; else None."""
    asked = "RAY_TMPDIR" in os.environ or len(os.fsencode(os.environ.get("TMPDIR", ""))) <= RAY_CHARACTERS
    return None if asked else "/tmp/ray"


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the command's SIGTERM handler. ``ray.init`` in the main thread would replace it by one that exits with
    code 15 (ray/_private/worker.py)."""
    original = ray_utils.set_sigterm_handler
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = original


def join(address: str, environment: dict[str, Any] | None = None, *, show_output: bool = False) -> None:
    """Join the cluster at ``address``. Raises LaunchError if no cluster answers or it rejects the token."""
    setting = f"RAY_ADDRESS={address}"
    if address == "auto" and (current := _current_cluster()):
        address, setting = current, f"RAY_ADDRESS=auto ({current} in {CURRENT_CLUSTER})"
    try:
        _require_listener(address)
        with _sigterm_kept():
            ray.init(address=address, runtime_env=environment, log_to_driver=show_output, logging_level=logging.ERROR)
    except Exception as error:
        end_ray()
        if any(word in repr(error).lower() for word in ("token", "authenticat")):
            raise LaunchError(
                f"{setting}: the cluster does not accept this token ({_first_line(error)}); set RAY_AUTH_MODE=token, "
                "and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN to the cluster's token"
            ) from error
        unset = f"remove {CURRENT_CLUSTER}" if "auto" in setting else "unset RAY_ADDRESS"
        raise LaunchError(
            f"{setting}: no Ray cluster answers ({_first_line(error)}); start one with 'ray start --head', set "
            f"address and token (RAY_AUTH_TOKEN) of the right one, or {unset} to start Ray on this machine"
        ) from error


def _current_cluster() -> str | None:
    """Return the address that the last ``ray start`` on this machine wrote. That cluster may have ended."""
    try:
        return CURRENT_CLUSTER.read_text().strip() or None
    except OSError:
        return None


def _require_listener(address: str) -> None:
    """Raise OSError if ``host:port`` does not accept connections. Ray itself would exit the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1 if "Traceback" in str(error) else 0]


SIZES_S = 30.0
"""Deadline in seconds for the sizes of all nodes, which includes the start of a worker process."""


def _sizes(nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Return type and memory of the GPUs, host memory and lockable memory of each node; empty for one that does not
    answer."""
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(_own_sizes)
    where = (NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes)
    answers = [ask.options(scheduling_strategy=strategy).remote() for strategy in where]
    ray.wait(answers, num_returns=len(answers), timeout=SIZES_S)
    return [_answered(answer) for answer in answers]


def _answered(answer: Any) -> dict[str, Any]:
    try:
        sizes: dict[str, Any] = ray.get(answer, timeout=0)
    except ray.exceptions.RayError:  # the node is lost or late, or lacks this package
        return {}
    return sizes


def _own_sizes() -> dict[str, Any]:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides GPUs from a task that requests none
    kind = gpu_type(device.driver_gpu_name() or "")
    sizes = {"gpu_bytes": device.driver_gpu_bytes(), "host_bytes": own_memory(), "lockable_bytes": lockable_bytes()}
    return sizes | {"gpu": kind}


def print_nodes(address: str) -> int:
    """Print the sizes of the alive nodes of the cluster at ``address`` as JSON. Return the exit code."""
    try:
        join(address)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpu_counts = [{"gpus": int(node["Resources"].get("GPU", 0))} for node in nodes]
    asked = [node["NodeID"] for node, has in zip(nodes, gpu_counts, strict=True) if has["gpus"]]
    sizes = dict(zip(asked, _sizes(asked), strict=True))
    print(json.dumps([has | sizes.get(node["NodeID"], {}) for node, has in zip(nodes, gpu_counts, strict=True)]))
    return 0


if __name__ == "__main__":
    sys.exit(print_nodes(sys.argv[1]))
