"""What an engine is started with: from the configuration, with explicit memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.sampling import truncations, warn_of_truncation

PROCESS_BYTES = 1 << 30
"""Memory of an engine process on CPU beside weights and KV cache: measured 0.9 to 1.1 GB with vLLM 0.32."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with."""

    model: str
    """HF folder."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """1, or data_parallel_size · tensor_parallel_size."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens of the longest sequence, prompt and response. None: the model's positions."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """Memory of the KV cache of one worker. Must be set on CPU, where vLLM's default takes 92 % of the machine."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    distributed_executor_backend: str | None = None
    """``ray``, ``mp`` or ``uni``; always ``mp`` on CPU. None: vLLM's choice."""
    seed: int = 0
    served_model_name: str | None = None
    """Model name in OpenAI requests. None: ``model``."""
    fully_sharded_loras: bool = False
    sleep_mode: bool = False
    """Keep weights and KV cache in memory that :meth:`sleep` can free (CUDA)."""
    ray_prometheus_stats: bool = False
    trust_remote_code: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Entries that replace those of the model's rotary parameters: ``rope_theta``, ``rope_type``, ``factor``, …"""
    logprobs_at_temperature: bool = False
    """Top-p, top-k, min-p or penalties are in use: take log-probs after the temperature and before these."""
    start_timeout_s: float = 1800.0
    log_file: Path | None = None
    """Where the processes' output goes. None: a temporary file."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vLLM's engine arguments, applied last."""

    @property
    def workers(self) -> int:
        """Processes that hold weights."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments, but for those that depend on the platform."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "served_model_name": self.served_model_name or self.model,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "enable_expert_parallel": self.expert_parallel_size > 1,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "distributed_executor_backend": self.distributed_executor_backend,
            "seed": self.seed,
            "fully_sharded_loras": self.fully_sharded_loras,
            "enable_sleep_mode": self.sleep_mode,
            "trust_remote_code": self.trust_remote_code,
            "logprobs_mode": "raw_logprobs" if self.logprobs_at_temperature else "processed_logprobs",
            "disable_log_stats": not self.ray_prometheus_stats,
        }
        if self.kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = self.kv_cache_bytes
        else:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if self.rope:
            arguments["hf_overrides"] = {"rope_parameters": rope_parameters(hf_config(self.model)) | dict(self.rope)}
        return arguments | dict(self.extra)


def engine_settings(cfg: SkyRLTrainConfig, **changes: Any) -> EngineSettings:
    """The engines that a configuration asks for. ``changes``: fields that differ between them (``log_file``).

    Warns when log-probs are not of the distribution that is sampled from and a correction would need that. Raises
    EngineError when the model folder has no readable ``config.json``.
    """
    generator, engine = cfg.generator, cfg.generator.inference_engine
    warn_of_truncation(cfg)
    model = str(cfg.trainer.policy.model.path)
    extra = dict(engine.engine_init_kwargs)
    evaluation = generator.eval_sampling_params
    responses = max(generator.sampling_params.max_generate_length, evaluation.max_generate_length if evaluation else 0)
    longest = extra.get("max_model_len") or (generator.max_input_length or cfg.trainer.max_prompt_length) + responses
    on_cpu = not device.has_cuda()
    kv_cache_bytes = extra.pop("kv_cache_memory_bytes", None)
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = cpu_kv_cache_bytes(model, engine.model_dtype, longest, engine.max_num_seqs)
    rope = dict(generator.rope_scaling or {})
    if generator.rope_theta is not None:
        rope["rope_theta"] = generator.rope_theta
    settings: dict[str, Any] = {
        "model": model,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "expert_parallel_size": engine.expert_parallel_size,
        "dtype": engine.model_dtype,
        "max_model_len": longest,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_bytes": kv_cache_bytes,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "distributed_executor_backend": engine.distributed_executor_backend,
        "seed": cfg.trainer.seed,
        "served_model_name": engine.served_model_name,
        "fully_sharded_loras": engine.fully_sharded_loras,
        "sleep_mode": cfg.trainer.placement.colocate_all and not on_cpu,
        "ray_prometheus_stats": engine.enable_ray_prometheus_stats,
        "trust_remote_code": cfg.trainer.trust_remote_code,
        "rope": rope,
        "logprobs_at_temperature": bool(truncations(generator.sampling_params)),
        "extra": extra,
    }
    return EngineSettings(**(settings | changes))


def hf_config(model: str) -> dict[str, Any]:
    """``config.json`` of a HF folder. Raises EngineError."""
    try:
        loaded: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{model}: no readable config.json there ({error}); give a HF folder as the model"
        ) from error
    return loaded


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a HF config, in the one place or the two where transformers has kept them."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    scaling = dict(config.get("rope_scaling") or {"rope_type": "default"})
    return {**scaling, "rope_theta": config.get("rope_theta", 10000.0)}


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of keys and values of one token in all layers."""
    item = _ITEM_BYTES.get(dtype) or _ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    if config.get("kv_lora_rank"):
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]  # the latent, once
    else:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        width = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    return int(config["num_hidden_layers"] * width * item)


def cpu_kv_cache_bytes(model: str, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """Room for ``max_num_seqs`` sequences of full length, at most a quarter of the memory available now and at least
    two such sequences; whole MiB."""
    import psutil

    a_sequence = kv_bytes_per_token(hf_config(model), dtype) * (-(-max_model_len // 128) + 1) * 128
    wanted = min(a_sequence * max_num_seqs, psutil.virtual_memory().available // 4)
    return -(-max(wanted, 2 * a_sequence) // (1 << 20)) << 20


def cpu_bytes_needed(settings: EngineSettings) -> int:
    """Memory that an engine takes on CPU: weights, KV cache, processes."""
    folder = Path(settings.model)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    stored = str(hf_config(settings.model).get("dtype") or hf_config(settings.model).get("torch_dtype"))
    wider = _ITEM_BYTES.get(settings.dtype, 0) / _ITEM_BYTES.get(stored, 2) if settings.dtype != "auto" else 1
    weights = int(on_disk * max(wider, 1)) * settings.data_parallel_size
    return weights + settings.workers * ((settings.kv_cache_bytes or 0) + PROCESS_BYTES) + PROCESS_BYTES
