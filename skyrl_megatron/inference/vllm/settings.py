"""The arguments and environment variables of an engine. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridges import files as json_file
from bridges.errors import BridgeError
from bridges.files import check_folder
from skyrl_megatron import device, hub
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hf_model import element_bytes, kv_bytes_per_token, model_repo, rope_parameters
from skyrl_megatron.config.roles import sends_adapters_alone
from skyrl_megatron.config.rules.passthrough import distribution_changes
from skyrl_megatron.config.rules.passthrough_keys import ENGINE
from skyrl_megatron.config.rules.rollout_rules import returns_sampling_support
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.vllm import processes
from skyrl_megatron.inference.vllm.adapter_versions import AdapterSlots
from skyrl_megatron.plugins import ADAPTERS


def worker_environment(*, exact: bool = False) -> dict[str, str]:
    """Return environment variables of engine processes, to be set before vLLM is imported.

    ``exact``: of :class:`EngineSettings`. On GPUs vLLM then computes by kernels that do not depend on the batch
    (vllm/model_executor/determinism/batch_invariant.py).
    """
    shared = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    shared |= device.compiler_environment()
    if not device.has_cuda():
        # vLLM's default binding pins every engine to the first core and requires as many NUMA nodes as tp ranks
        shared |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": processes.omp_threads()}
    elif exact:
        shared |= {"VLLM_BATCH_INVARIANT": "1"}
    return shared


def platform_arguments(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments that the platform needs for a model."""
    if device.has_cuda():
        return {}
    arguments: dict[str, Any] = {"distributed_executor_backend": "mp"}
    if "kv_lora_rank" in hf_config:
        # vLLM's CPU rotary kernel is wrong for the 3-D queries of multi-head latent attention: use the torch version
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of the language model in an HF folder after checking its files. Raises EngineError."""
    return json_file.text_config(_whole_config(folder))


def _whole_config(folder: Path) -> dict[str, Any]:
    try:
        check_folder(folder)
        whole = json_file.read_hf_config(folder)
        json_file.text_config(whole)
        return whole
    except BridgeError as error:
        raise EngineError(f"{folder}: no readable config.json ({error}); set the model to an HF folder") from error


def cpu_kv_cache_bytes(folder: Path, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """Return the KV cache size for ``max_num_seqs`` sequences of full length, in bytes (whole MiB).

    At most a quarter of the available memory, and at least two such sequences.
    """
    import psutil

    sequence = _kv_bytes_per_token(folder, dtype) * (-(-max_model_len // 128) + 1) * 128
    size: int = min(sequence * max_num_seqs, psutil.virtual_memory().available // 4)
    return -(-max(size, 2 * sequence) // (1 << 20)) << 20


def _kv_bytes_per_token(folder: Path, dtype: str) -> int:
    """Return the KV cache bytes per token. Sizes that ``config.json`` omits are transformers' defaults."""
    hf = hf_config(folder)
    try:
        return kv_bytes_per_token(hf, dtype)
    except KeyError:
        from bridges.hf_config import read_config  # imports transformers, which is slow

    try:
        return kv_bytes_per_token(read_config(hf, str(hf.get("model_type"))).to_dict(), dtype)
    except (BridgeError, KeyError, TypeError) as error:
        raise EngineError(
            f"{folder}: config.json lacks the sizes of its attention ({error}); download the file again"
        ) from error


def cpu_weight_bytes(folder: Path, dtype: str) -> int:
    """Return the memory of the weights on CPU: their size on disk, or more if ``dtype`` is wider."""
    hf = hf_config(folder)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return int(on_disk * max(element_bytes(dtype, hf) / element_bytes("auto", hf), 1))


PROCESS_BYTES = 1 << 30
"""Memory of an engine process on CPU without weights and KV cache: 0.9 to 1.1 GB measured with vLLM 0.32."""

_FROM_CONFIG = (
    *(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
    ),
    *("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "fully_sharded_loras"),
    *("distributed_executor_backend", "enable_return_routed_experts"),
)
"""Fields with the same name in ``generator.inference_engine``, :class:`EngineSettings` and vLLM."""
_SAME_IN_VLLM = ("dtype", "max_model_len", "seed", "trust_remote_code")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The arguments of one engine."""

    model: str
    """HF folder, or a model of the Hugging Face hub (``org/name``) with its commit in ``hub_commit``."""
    hub_commit: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    """1, or data_parallel_size · tensor_parallel_size."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """Longest sequence (prompt and response) in tokens. None: the model's maximum."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    """KV cache size per worker. On CPU, :meth:`on_this_node` sets it: vLLM's default is 92 % of the memory."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    distributed_executor_backend: str | None = None
    """``ray`` (for engines over several nodes), ``mp`` or ``uni``; always ``mp`` on CPU. None: vLLM's choice."""
    seed: int = 0
    served_model_name: str | None = None
    """Model name in OpenAI requests. None: ``model``."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls in OpenAI responses. None: requests with tools are rejected."""
    fully_sharded_loras: bool = False
    sleep_mode: bool = False
    """Allocate weights and KV cache so that :meth:`VLLMEngine.sleep` can free them."""
    ray_prometheus_stats: bool = False
    trust_remote_code: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the model's rotary parameters: ``rope_theta``, ``rope_type``, ``factor``, …"""
    model_changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to ``config.json`` that the trainer makes too (``model_config_kwargs``)."""
    logprobs_at_temperature: bool = False
    """Compute log-probs after the temperature, but before top-p, top-k, min-p and penalties."""
    return_support: bool = False
    """Return the token ids that each token was sampled from, and compute log-probs over them."""
    enable_return_routed_experts: bool = False
    """Return the experts of each token."""
    clear_kv_cache: bool = False
    """Frozen requests recompute their keys and values after a weight update."""
    start_timeout_s: float = 1800.0
    log_file: Path | None = None
    """File for the output of the processes. None: a temporary file."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM, applied last."""
    exact: bool = False
    """Compute as the trainer does (``trainer.exact_rollouts``)."""
    exact_parts: int = 1
    """Tensor-parallel ranks of the trainer for each of the engine: a rank adds as many products. Only on CPU."""
    adapters: AdapterSlots | None = None
    """Weight updates send adapters. None: they send weights."""

    @property
    def folder(self) -> Path:
        """The model's folder on this node. Raises HubError for a hub model that cannot be fetched."""
        if self.hub_commit is None:
            return Path(self.model)
        return hub.fetch(hub.Repo("model", self.model), self.hub_commit, hub.WHOLE)

    @property
    def workers(self) -> int:
        """Number of processes with weights."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def cpu_bytes(self) -> int:
        """Memory of the engine on CPU: weights, KV cache, processes. Raises EngineError as :func:`hf_config`."""
        weights = cpu_weight_bytes(self.folder, self.dtype) * self.data_parallel_size
        return weights + self.workers * ((self.kv_cache_bytes or 0) + PROCESS_BYTES) + PROCESS_BYTES

    def on_this_node(self) -> EngineSettings:
        """Return the settings with those that depend on this machine. Call it on the machine that runs the engine.

        Raises EngineError as :func:`hf_config`.
        """
        if device.has_cuda():
            return self
        kv_cache_bytes = self.kv_cache_bytes
        if kv_cache_bytes is None and self.max_model_len is not None:
            kv_cache_bytes = cpu_kv_cache_bytes(self.folder, self.dtype, self.max_model_len, self.max_num_seqs)
        return replace(self, kv_cache_bytes=kv_cache_bytes)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments, except those of :func:`platform_arguments`."""
        arguments: dict[str, Any] = {name: getattr(self, name) for name in (*_FROM_CONFIG, *_SAME_IN_VLLM)}
        arguments |= {
            "model": str(self.folder),
            "served_model_name": self.served_model_name or self.model,
            "enable_expert_parallel": self.expert_parallel_size > 1,
            "enable_sleep_mode": self.sleep_mode,
            "logprobs_mode": "raw_logprobs" if self.logprobs_at_temperature else "processed_logprobs",
            "return_sampling_mask": self.return_support,
            "disable_log_stats": not self.ray_prometheus_stats,
            # from the folder's generation_config.json, use only the EOS ids, not the sampling defaults
            "generation_config": "vllm",
        }
        arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if self.kv_cache_bytes is not None:  # vLLM still requires that the share above is free
            arguments["kv_cache_memory_bytes"] = self.kv_cache_bytes
        if self.adapters is not None:
            arguments |= self.adapters.arguments()
        if self.sleep_mode and "speculative_config" in self.extra:
            # weight syncs do not send the draft model, so sleep must keep it (vllm/v1/worker/gpu_worker.py, ``sleep``)
            arguments["sleep_preserve_parameter_names"] = ["draft.*"]
        overrides = dict(self.model_changes)
        if self.rope:
            changed = hf_config(self.folder) | overrides
            overrides["rope_parameters"] = rope_parameters(changed) | dict(self.rope)
        extra = dict(self.extra)
        config: dict[str, Any] = {}
        if (self.folder / json_file.CONFIG).is_file():  # else vLLM says what is missing
            config = _whole_config(self.folder)
        user_overrides = extra.get("hf_overrides")
        user_overrides = dict(user_overrides) if isinstance(user_overrides, Mapping) else {}
        if json_file.holds_text_model(config):  # a model of text and images, which runs without its vision tower
            arguments["language_model_only"] = True
            inner = {name: user_overrides.pop(name) for name in [*user_overrides] if name not in config}
            overrides |= inner | dict(user_overrides.pop("text_config", None) or {})
            overrides = {"text_config": overrides} if overrides else {}
        if overrides:
            extra["hf_overrides"] = overrides | user_overrides
        return arguments | extra


def engine_settings(cfg: SkyRLTrainConfig, **changes: Any) -> EngineSettings:
    """Return the engine settings of a configuration. ``changes``: fields that differ between engines (``log_file``).

    Raises EngineError if the model folder has no readable ``config.json``.
    """
    generator, engine = cfg.generator, cfg.generator.inference_engine
    megatron = cfg.trainer.policy.megatron_config
    repo = model_repo(cfg, "policy")
    extra = {name: value for name, value in engine.engine_init_kwargs.items() if name not in ENGINE.own_keys}
    evaluation = generator.eval_sampling_params
    responses = max(generator.sampling_params.max_generate_length, evaluation.max_generate_length if evaluation else 0)
    longest = extra.get("max_model_len") or (generator.max_input_length or cfg.trainer.max_prompt_length) + responses
    kv_cache_bytes = extra.pop("kv_cache_memory_bytes", None)
    slots = extra.pop("max_loras", None)
    adapters = ADAPTERS.require("served")(cfg, slots) if sends_adapters_alone(cfg) else None
    rope = dict(generator.rope_scaling or {})
    if generator.rope_theta is not None:
        rope["rope_theta"] = generator.rope_theta
    settings: dict[str, Any] = {name: getattr(engine, name) for name in _FROM_CONFIG}
    settings |= {
        "model": str(cfg.trainer.policy.model.path),
        "hub_commit": cfg.trainer.hub_commits.get(repo.key) or hub.resolve(repo) if repo else None,
        "expert_parallel_size": engine.expert_parallel_size,
        "dtype": engine.model_dtype,
        "max_model_len": longest,
        "kv_cache_bytes": kv_cache_bytes,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "seed": cfg.trainer.seed,
        "served_model_name": engine.served_model_name,
        "tool_call_parser": engine.tool_call_parser,
        "sleep_mode": cfg.trainer.placement.colocate_all,
        "ray_prometheus_stats": engine.enable_ray_prometheus_stats,
        "trust_remote_code": cfg.trainer.trust_remote_code,
        "rope": rope,
        "model_changes": {
            **cfg.trainer.policy.model_config_kwargs,
            **cfg.trainer.policy.megatron_config.model_config_kwargs,
        },
        "logprobs_at_temperature": bool(distribution_changes(generator.sampling_params))
        and not returns_sampling_support(cfg.generator),
        "return_support": returns_sampling_support(cfg.generator),
        "exact": cfg.trainer.exact_rollouts,
        "exact_parts": max(megatron.tensor_model_parallel_size // engine.tensor_parallel_size, 1),
        "clear_kv_cache": cfg.trainer.fully_async.clear_kv_cache_on_weight_sync,
        "extra": extra,
        "adapters": adapters,
    }
    return EngineSettings(**(settings | changes))
