"""Data, environments, inference engines and rollouts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron import device
from skyrl_megatron.config.fields import Bounds, Count, Fraction, NonNegative, NonNegativeInt, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig


@dataclass
class DataConfig(BaseConfig):
    """Datasets of prompts."""

    train_data: list[str] = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/train.parquet")])
    """Training prompts: paths of parquet, json or jsonl files, or data sets of the Hugging Face hub, written
    `org/name[@revision][:subset][:split]` (one part after the name is the split; default `train`)."""
    val_data: list[str] = field(default_factory=lambda: [os.path.expanduser("~/data/gsm8k/validation.parquet")])
    """Evaluation prompts, in the same forms. An empty list turns evaluation off."""


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """Environment `text2sql`."""

    db_path: str = field(default_factory=lambda: os.path.expanduser("~/data/sql_data"))
    """Folder of the SQLite databases, opened read-only."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """Environment `search`."""

    log_requests: bool = False
    """Log each query."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """The retriever."""
    topk: Count = 3
    """Passages per query."""
    timeout: Positive = 30.0
    """Seconds that a query may take."""


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Environment `gsm8k_llm_judge`."""

    model: str = "gpt-4o-mini"
    """Model that judges."""
    base_url: str | None = None
    """OpenAI-compatible endpoint. None: the `openai` client's own choice (`OPENAI_BASE_URL`)."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Environments that come with the package."""

    max_env_workers: Count = 32
    """Environments that run at the same time."""
    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """SQL."""
    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """A model as judge."""
    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Search."""
    env_timeout: Positive = 600.0
    """Seconds that one call of an environment may take. A trajectory whose environment takes longer is masked and
    counted."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """The environment."""

    env_class: str = "gsm8k"
    """Environment of prompts that do not name their own."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings of the environments."""


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


@dataclass
class SamplingParams(BaseConfig):
    """How tokens are drawn."""

    max_generate_length: Count = 1024
    """Tokens generated per turn."""
    repetition_penalty: Positive = 1.0
    """Above 1 discourages tokens already seen."""
    temperature: NonNegative = 1.0
    """0 is greedy; training needs more than 0."""
    top_p: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    """Draw from the smallest set of tokens with this probability."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this share of the likeliest."""
    top_k: Annotated[int, Bounds(1, also=(-1, 0))] = -1
    """Draw from the so many likeliest tokens; -1 or 0: all."""
    logprobs: Annotated[int | None, Bounds(0, 1)] = 1
    """Return the sampled token's log-probability; 0 and 1 mean the same, None returns none."""
    stop: list[str] | None = None
    """Strings that end a generation."""
    additional_kwargs: dict[str, Any] | None = None
    """Further fields of vLLM's `SamplingParams`."""


@dataclass
class ChatTemplateConfig(BaseConfig):
    """Chat template other than the tokenizer's own."""

    source: Annotated[str, OneOf("name", "file")] = "name"
    """Whether `name_or_path` is a built-in name or a Jinja file."""
    name_or_path: str | None = None
    """The template. None: the tokenizer's."""


@dataclass
class GeneratorConfig(BaseConfig):
    """How prompts become trajectories."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The engines."""
    n_samples_per_prompt: Count = 5
    """Responses sampled of each prompt."""
    batched: bool = False
    """Generate single-turn responses in one call instead of one agent loop each."""
    max_turns: Count = 1
    """Turns of the policy in one trajectory."""
    max_input_length: Count | None = None
    """Tokens of context that a turn may start from. None: `trainer.max_prompt_length`, as a single turn
    requires."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tokenizer.apply_chat_template`."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling in training."""
    use_conversation_multi_turn: bool = True
    """Each turn and observation is a chat message of its own; false: all continue one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the end-of-sequence token to a turn that ended at a stop string."""
    eval_sampling_params: SamplingParams | None = None
    """Sampling in evaluation. None: greedy. Its `max_generate_length`, if not given, is the training one."""
    eval_n_samples_per_prompt: Count = 1
    """Responses per prompt in evaluation."""
    zero_reward_on_non_stop: bool = False
    """Responses that were cut off get reward 0."""
    apply_overlong_filtering: bool = False
    """Responses that were cut off are masked out of the loss (DAPO, arXiv:2503.14476)."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling of the engines. None: `trainer.rope_scaling`."""
    rope_theta: Positive | None = None
    """Base of the engines' rotary frequencies. None: `trainer.rope_theta`."""
    step_wise_trajectories: bool = False
    """Each turn becomes a training sequence of its own, with the trajectory's advantage."""
    merge_stepwise_output: bool = False
    """Join turns of `step_wise_trajectories` whose prompt begins with the turn before, prompt and response."""
    name: str = "skyrl_gym"
    """The generator: `skyrl_gym`, or one that a plugin registered."""
