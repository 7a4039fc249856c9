"""Starting Ray on this machine: loopback only, token authentication, nothing left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import ray

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.workers.ports import LOOPBACK

FORWARDED_PREFIXES = ("HF_", "WANDB_", "MLFLOW_", "VLLM_", "NCCL_")


def worker_environment() -> dict[str, str]:
    """Variables that every actor gets: one thread per process unless told otherwise, and what the user exported."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        **forwarded,
    }


@contextlib.contextmanager
def local_ray(slots: int, *, object_store_bytes: int = 256 << 20) -> Iterator[None]:
    """A Ray of our own for the enclosed block, with ``slots`` logical CPUs. Its processes end with the block."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(
            address="local",
            num_cpus=slots,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            log_to_driver=bool(os.environ.get("SKYRL_WORKER_LOGS")),
            logging_level="ERROR",
            runtime_env={"env_vars": worker_environment()},
            _node_ip_address=LOOPBACK,
        )
    except Exception as error:
        ray.shutdown()
        raise LaunchError(f"Ray did not start on {LOOPBACK}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
