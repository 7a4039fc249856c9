"""What vLLM needs on the machine at hand: variables of its processes, and arguments. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.inference.vllm import processes


def worker_environment() -> dict[str, str]:
    """Return the environment that engine processes need, to be set before an engine is started."""
    shared = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    shared |= device.compiler_environment()
    if not device.has_cuda():
        # The default binding pins every engine to the first core and asserts as many NUMA nodes as tp ranks.
        shared |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": processes.omp_threads()}
    return shared


def platform_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments that the platform needs for a model."""
    if device.has_cuda():
        return {}
    arguments: dict[str, Any] = {"distributed_executor_backend": "mp"}
    if "kv_lora_rank" in hf_config:
        # vLLM's CPU rotary kernel is wrong for the 3-D queries of multi-head latent attention: use the torch one
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments
