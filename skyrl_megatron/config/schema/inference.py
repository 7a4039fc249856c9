"""Inference engines: how many, how they are built, and how they get new weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron import device
from skyrl_megatron.config.fields import Bounds, Count, NonNegativeInt, OneOf, Positive
from skyrl_megatron.config.schema.base import BaseConfig


@dataclass
class InferenceEngineConfig(BaseConfig):
    """vLLM engines. Each takes tp·pp·dp GPUs."""

    model_dtype: Annotated[str, OneOf("bfloat16", "float16", "float32", "auto")] = "bfloat16"
    """Type of the engine's weights. On CPU: float32."""
    run_engines_locally: bool = True
    """Start engines in this cluster. False: use those at `remote_urls` or `external_server_urls`."""
    num_engines: Count = 1
    """Engines."""
    backend: str = "vllm"
    """The inference library: `vllm`, or an engine that a plugin registered."""
    weight_sync_backend: str = device.NCCL
    """What carries new weights: `nccl`, `gloo`, or a transport that a plugin registered. On CPU: gloo. With
    `colocate_all`, instead of nccl and gloo: memory that a rank and the engine on its GPU share (CUDA IPC); over
    several nodes, or with `data_parallel_size` above 1, ranks give one another what is for these engines first."""
    weight_transfer_threshold_cuda_ipc_GB: Positive = 1.0
    """No effect: weights travel in buckets of 16 MiB."""
    tensor_parallel_size: Count = 1
    """tp of each engine."""
    pipeline_parallel_size: Count = 1
    """pp of each engine."""
    expert_parallel_size: Count = 1
    """ep of each engine: 1, or data_parallel_size · tensor_parallel_size."""
    data_parallel_size: Count = 1
    """dp inside each engine."""
    async_engine: bool = True
    """No effect: engines are always asynchronous."""
    vllm_v1_disable_multiproc: bool = True
    """No effect: `trainer.deterministic` makes sampling reproducible."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of common prefixes; it is reset at each weight sync."""
    enable_chunked_prefill: bool = True
    """Mix prefill of long prompts with decoding."""
    max_num_batched_tokens: Count = 8192
    """Tokens that an engine processes in one step."""
    enforce_eager: bool = True
    """No CUDA graphs: slower, and closer to the trainer's numbers."""
    fully_sharded_loras: bool = False
    """Shard both LoRA matrices over tp in the engine."""
    enable_ray_prometheus_stats: bool = False
    """Publish engine metrics through Ray's Prometheus exporter."""
    gpu_memory_utilization: Annotated[float, Bounds(0, 1, open_low=True)] = 0.8
    """Share of GPU memory that an engine may take."""
    max_num_seqs: Count = 1024
    """Sequences that an engine decodes at the same time."""
    remote_urls: list[str] = field(default_factory=list)
    """`host:port` of engines started elsewhere."""
    enable_http_endpoint: bool = False
    """Serve an OpenAI-compatible endpoint over all engines. Set `trainer.algorithm.temperature` when sampling
    there."""
    http_endpoint_host: str = "127.0.0.1"
    """Address that the endpoint binds to."""
    http_endpoint_port: Annotated[int, Bounds(0, 65535)] = 8000
    """Port of the endpoint; 0 takes a free one."""
    served_model_name: str | None = None
    """Model name that requests to the endpoint give. None: the model's path."""
    distributed_executor_backend: Annotated[str, OneOf("ray", "mp", "uni")] = "ray"
    """How an engine starts its ranks: `ray`, processes where it lies on one node and Ray actors where it lies on
    several; `mp`, processes; `uni`, its one rank inside its own process. On CPU: mp."""
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, applied last."""
    override_existing_update_group: Annotated[str, OneOf("auto", "enable", "disable")] = "auto"
    """No effect: an update group left by an earlier run is always replaced."""
    external_proxy_url: str | None = None
    """URL that requests for samples go to, when a router stands before engines started elsewhere."""
    external_server_urls: list[str] | None = None
    """URLs of engines started elsewhere, for control: pause, weight updates, versions."""
    enable_return_routed_experts: bool = False
    """Engines return the experts that each token was routed to, for `moe_enable_routing_replay`. Engines that this run
    starts, with prefix caching and without pipeline parallelism."""
    return_sampling_support: bool | None = None
    """Engines return which tokens top-p, top-k and min-p left to sample from, and the trainer's softmax is taken over
    the same: ratios and KL then compare what was sampled from. None: when those are set, nothing else changes the
    distribution (penalties), and the engines are this run's own, without an HTTP endpoint."""
    http_token_path: str | None = None
    """File that holds the endpoint's bearer token (mode 0600). None: a new one in the run's log folder."""
    enable_registry: bool = False
    """Engines started elsewhere may join and leave while the run goes (docs/guides/cluster.md)."""
    registry_host: str = "127.0.0.1"
    """Address that the registry binds to, where engines join."""
    registry_port: Annotated[int, Bounds(0, 65535)] = 8001
    """Port of the registry; 0 takes a free one."""
    registry_token_path: str | None = None
    """File that holds the registry's bearer token (mode 0600). None: a new one in the run's log folder."""
    registry_min_engines: NonNegativeInt = 0
    """Engines that must have joined before the run starts, besides its own."""
    registry_silence_s: Positive = 60.0
    """An engine that gives no sign of life for so long is lost; it gives five or more in that time."""
    registry_drain_s: Positive = 60.0
    """How long the requests of an engine that leaves may take; what is left starts over elsewhere."""
    restarts_per_hour: Count = 3
    """Restarts of an engine within an hour, above which it is left out; the run ends when none is left."""
    weight_sync_routes: bool = True
    """Send each engine worker its own part of the weights alone, where vLLM's loaders can be recorded; else every
    worker gets all weights and takes its part; the log says why. With `colocate_all` over several nodes, or with
    `data_parallel_size` above 1, it must be true."""
    weight_sync_probe_interval: NonNegativeInt = 20
    """Every so many weight syncs trainer and engines score the same tokens and must agree; 0: after the first sync
    only."""
    weight_sync_probe_limit: Positive | None = None
    """How far log-probs of trainer and engines may be apart on average, in nats. None: what rounding explains; set it
    for a run whose model rounds more, once it is known that the weights are right."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls in answers of the endpoint (`hermes`, `qwen3_coder`, ...), which requests with
    `tools` need. None: such requests are refused."""
