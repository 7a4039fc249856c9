"""Older and other spellings of keys, and the one warning that names the new ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

_ENGINE = "generator.inference_engine"
_KEPT_THEIR_NAME = """
    model_dtype run_engines_locally backend weight_sync_backend weight_transfer_threshold_cuda_ipc_GB async_engine
    vllm_v1_disable_multiproc enable_prefix_caching enable_chunked_prefill max_num_batched_tokens enforce_eager
    fully_sharded_loras enable_ray_prometheus_stats gpu_memory_utilization max_num_seqs enable_http_endpoint
    http_endpoint_host http_endpoint_port served_model_name engine_init_kwargs override_existing_update_group
    external_proxy_url external_server_urls
""".split()

DEPRECATED: Mapping[str, str] = MappingProxyType(
    {f"generator.{name}": f"{_ENGINE}.{name}" for name in _KEPT_THEIR_NAME}
    | {
        "generator.num_inference_engines": f"{_ENGINE}.num_engines",
        "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
        "generator.inference_engine_pipeline_parallel_size": f"{_ENGINE}.pipeline_parallel_size",
        "generator.inference_engine_expert_parallel_size": f"{_ENGINE}.expert_parallel_size",
        "generator.inference_engine_data_parallel_size": f"{_ENGINE}.data_parallel_size",
        "generator.remote_inference_engine_urls": f"{_ENGINE}.remote_urls",
    }
)
"""Flat engine keys of older configurations → where they live now."""

DROPPED: Mapping[str, str] = MappingProxyType({"generator.model_name": "trainer.policy.model.path"})
"""Older keys that repeat another one → the key that counts."""

ALIASES: Mapping[str, str] = MappingProxyType({"trainer.remove_microbatch_padding": "trainer.use_sample_packing"})
"""Other names in current use."""


def warn_deprecated(used: Mapping[str, str]) -> None:
    """Give one DeprecationWarning for all older spellings of a configuration, each with its new key.

    Attributed to the caller of ``SkyRLTrainConfig.from_cli_overrides``, so that Python shows it to a script.
    """
    if not used:
        return
    lines = [
        f"  {old} is dropped: {new} says it" if old in DROPPED else f"  {old} is now {new}"
        for old, new in sorted(used.items())
    ]
    warnings.warn("older spelling of configuration keys:\n" + "\n".join(lines), DeprecationWarning, stacklevel=4)
