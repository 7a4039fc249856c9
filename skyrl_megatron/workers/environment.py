"""What every actor finds in its environment. Imports no Ray.

Ray writes a ``runtime_env`` into logs that everybody can read and into the arguments of processes, so that none of the
user's variables is in one: any of them may be a credential, whatever its name. The workers of a Ray of our own inherit
them from the process that starts it; those of a cluster that was joined set them themselves, from the memory of
Ray's head (:func:`joined_environment`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

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
