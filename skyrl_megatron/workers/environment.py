"""What every actor finds in its environment. Imports no Ray."""

from __future__ import annotations

import os

FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "MLFLOW_", "SWANLAB_", "VLLM_", "SKYRL_"),
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "NVTE_"),
)


def worker_environment() -> dict[str, str]:
    """Return the variables of every actor: the user's own, and one thread per process unless the user set it."""
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", ""),
    }
    return variables | {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
