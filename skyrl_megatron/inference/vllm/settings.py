"""The arguments and environment variables that an engine is started with. Imports no vLLM."""

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
from skyrl_megatron.config.hf_model import element_bytes, kv_bytes_per_token, rope_parameters
from skyrl_megatron.config.rules.rollout_rules import support_travels, truncations
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.sampling_params import warn_of_truncation
from skyrl_megatron.inference.vllm import processes
from skyrl_megatron.inference.vllm.adapter_versions import AdapterSlots, adapter_slots
from skyrl_megatron.weight_sync.adapter_tensors import configured_pairs


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


def hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a HF folder, all of whose files vLLM may then open. Raises EngineError."""
    try:
        check_folder(folder)
        return json_file.read_hf_config(folder)
    except BridgeError as error:
        raise EngineError(f"{folder}: no readable config.json ({error}); give a HF folder as the model") from error


def cpu_kv_cache_bytes(folder: Path, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """Return room for ``max_num_seqs`` sequences of full length, in whole MiB.

    At most a quarter of the memory available now, and at least two such sequences.
    """
    import psutil

    a_sequence = _kv_bytes_per_token(folder, dtype) * (-(-max_model_len // 128) + 1) * 128
    wanted: int = min(a_sequence * max_num_seqs, psutil.virtual_memory().available // 4)
    return -(-max(wanted, 2 * a_sequence) // (1 << 20)) << 20


def _kv_bytes_per_token(folder: Path, dtype: str) -> int:
    """Return the bytes of a token; a file that leaves out a size has transformers' default of its family."""
    hf = hf_config(folder)
    try:
        return kv_bytes_per_token(hf, dtype)
    except KeyError:
        from bridges.hf_config import read_config  # loads transformers, which a file with all sizes need not wait for

    try:
        return kv_bytes_per_token(read_config(hf, str(hf.get("model_type"))).to_dict(), dtype)
    except (BridgeError, KeyError, TypeError) as error:
        raise EngineError(
            f"{folder}: config.json does not say how large its attention is ({error}); fetch the file again"
        ) from error


def cpu_weight_bytes(folder: Path, dtype: str) -> int:
    """Return the memory of the weights on CPU: as they are on disk, or more where ``dtype`` is wider."""
    hf = hf_config(folder)
    on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return int(on_disk * max(element_bytes(dtype, hf) / element_bytes("auto", hf), 1))


PROCESS_BYTES = 1 << 30
"""Memory of an engine process on CPU beside weights and KV cache: measured 0.9 to 1.1 GB with vLLM 0.32."""

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
"""Fields with one name in ``generator.inference_engine``, in :class:`EngineSettings` and in vLLM."""
_SAME_IN_VLLM = ("dtype", "max_model_len", "seed", "trust_remote_code")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The arguments of one engine."""

    model: str
    """HF folder, or a model of the Hugging Face hub (``org/name``), with its commit in ``hub_commit``."""
    hub_commit: str | None = None
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
    """Memory of the KV cache of one worker. On CPU, where vLLM's default takes 92 % of the machine,
    :meth:`on_this_node` sets it."""
    gpu_memory_utilization: float = 0.8
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    distributed_executor_backend: str | None = None
    """``ray`` (engines over nodes), ``mp`` or ``uni``; always ``mp`` on CPU. None: vLLM's choice."""
    seed: int = 0
    served_model_name: str | None = None
    """Model name in OpenAI requests. None: ``model``."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls in OpenAI answers. None: requests with tools are refused."""
    fully_sharded_loras: bool = False
    sleep_mode: bool = False
    """Keep weights and KV cache in memory that :meth:`sleep` can free."""
    ray_prometheus_stats: bool = False
    trust_remote_code: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Entries that replace those of the model's rotary parameters: ``rope_theta``, ``rope_type``, ``factor``, …"""
    logprobs_at_temperature: bool = False
    """Top-p, top-k, min-p or penalties are in use: take log-probs after the temperature and before these."""
    return_support: bool = False
    """Return what each token was sampled from, and take log-probs over it."""
    enable_return_routed_experts: bool = False
    """Return the experts that tokens were routed to."""
    clear_kv_cache: bool = False
    """Frozen requests compute their keys and values anew with each new weights."""
    start_timeout_s: float = 1800.0
    log_file: Path | None = None
    """Where the processes' output goes. None: a temporary file."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vLLM's engine arguments, applied last."""
    adapters: AdapterSlots | None = None
    """Updates bring adapters to the weights of the folder. None: they bring weights."""

    @property
    def folder(self) -> Path:
        """The model's folder on the node that asks. Raises HubError for a hub model that cannot be fetched there."""
        if self.hub_commit is None:
            return Path(self.model)
        return hub.fetch(hub.Repo("model", self.model), self.hub_commit, hub.WHOLE)

    @property
    def workers(self) -> int:
        """Processes that hold weights."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def cpu_bytes(self) -> int:
        """Memory that the engine takes on CPU: weights, KV cache, processes. Raises EngineError as hf_config does."""
        weights = cpu_weight_bytes(self.folder, self.dtype) * self.data_parallel_size
        return weights + self.workers * ((self.kv_cache_bytes or 0) + PROCESS_BYTES) + PROCESS_BYTES

    def on_this_node(self) -> EngineSettings:
        """Return the settings with what depends on the machine that the engine runs on; the driver's may be another.

        Raises EngineError as hf_config does.
        """
        if device.has_cuda():
            return self
        kv_cache_bytes = self.kv_cache_bytes
        if kv_cache_bytes is None and self.max_model_len is not None:
            kv_cache_bytes = cpu_kv_cache_bytes(self.folder, self.dtype, self.max_model_len, self.max_num_seqs)
        return replace(self, kv_cache_bytes=kv_cache_bytes)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments, but for those that depend on the platform."""
        arguments: dict[str, Any] = {name: getattr(self, name) for name in (*_FROM_CONFIG, *_SAME_IN_VLLM)}
        arguments |= {
            "model": str(self.folder),
            "served_model_name": self.served_model_name or self.model,
            "enable_expert_parallel": self.expert_parallel_size > 1,
            "enable_sleep_mode": self.sleep_mode,
            "logprobs_mode": "raw_logprobs" if self.logprobs_at_temperature else "processed_logprobs",
            "return_sampling_mask": self.return_support,
            "disable_log_stats": not self.ray_prometheus_stats,
            # the folder's generation_config.json gives ids of end of sequence; what a request leaves out is neutral
            "generation_config": "vllm",
        }
        arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if self.kv_cache_bytes is not None:  # vLLM still refuses to start unless the share above is free
            arguments["kv_cache_memory_bytes"] = self.kv_cache_bytes
        if self.adapters is not None:
            arguments |= {
                "enable_lora": True,
                "max_loras": self.adapters.slots,
                "max_cpu_loras": self.adapters.slots,
                "max_lora_rank": self.adapters.rank,
                "lora_target_modules": list(self.adapters.targets),
                "enable_mixed_moe_lora_format": "experts" in self.adapters.targets,
            }
        if self.sleep_mode and "speculative_config" in self.extra:
            # what syncs do not bring would be lost with all other memory (vllm/v1/worker/gpu_worker.py, ``sleep``)
            arguments["sleep_preserve_parameter_names"] = ["draft.*"]
        if self.rope:
            arguments["hf_overrides"] = {"rope_parameters": rope_parameters(hf_config(self.folder)) | dict(self.rope)}
        return arguments | dict(self.extra)


def engine_settings(cfg: SkyRLTrainConfig, **changes: Any) -> EngineSettings:
    """Return the engines that a configuration asks for. ``changes``: fields that differ between them (``log_file``).

    Warns when log-probs are not of the distribution that is sampled from and a correction would need that. Raises
    EngineError when the model folder has no readable ``config.json``.
    """
    generator, engine = cfg.generator, cfg.generator.inference_engine
    warn_of_truncation(cfg)
    repo = hub.model_repo(cfg, "policy")
    extra = dict(engine.engine_init_kwargs)
    evaluation = generator.eval_sampling_params
    responses = max(generator.sampling_params.max_generate_length, evaluation.max_generate_length if evaluation else 0)
    longest = extra.get("max_model_len") or (generator.max_input_length or cfg.trainer.max_prompt_length) + responses
    kv_cache_bytes = extra.pop("kv_cache_memory_bytes", None)
    adapters = adapter_slots(configured_pairs(cfg), extra.pop("max_loras", None))
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
        "logprobs_at_temperature": bool(truncations(generator.sampling_params)) and not support_travels(cfg),
        "return_support": support_travels(cfg),
        "clear_kv_cache": cfg.trainer.fully_async.clear_kv_cache_on_weight_sync,
        "extra": extra,
        "adapters": adapters,
    }
    return EngineSettings(**(settings | changes))
