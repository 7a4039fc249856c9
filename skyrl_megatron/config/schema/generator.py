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
    eval_sets: dict[str, Any] = field(default_factory=dict)
    """More evaluation sets (docs/guides/data.md). `{hard: {data: [FILE], n: 4, temperature: 0.7}}`: four
    responses to each prompt of a file, scored as `eval/hard/…`."""
    sampler: str = "shuffle"
    """Order of the prompts: `shuffle` (anew each epoch), `in_order`, `mixture` (data sets by weight), `list`,
    `easy_to_hard`, `pools` (by success rate), or a plugin's (docs/guides/data.md)."""
    sampler_options: dict[str, Any] = field(default_factory=dict)
    """Options of the sampler (docs/guides/data.md)."""
    strict_rows: bool = False
    """Refuse a prompt whose messages have a key that nothing reads, which is otherwise named once."""
    row_cache_gb: NonNegative = 100.0
    """Size of the folder with the tokens of rows (`$SKYRL_MEGATRON_HOME/rows`), in GB, above which those of the data
    sets that were not used for longest are removed. 0: rows are tokenized in each run."""


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
    """URL of the retriever."""
    topk: Count = 3
    """Number of passages per query."""
    timeout: Positive = 30.0
    """Timeout of a query in seconds."""


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Environment `gsm8k_llm_judge`."""

    model: str = "gpt-4o-mini"
    """Model that scores the answers."""
    base_url: str | None = None
    """OpenAI-compatible endpoint. None: the default of the `openai` client (`OPENAI_BASE_URL`)."""


@dataclass
class TaskEnvConfig(BaseConfig):
    """What a task folder may ask for; more is lowered to this."""

    images: list[str] = field(default_factory=list)
    """Paths on this machine (`fnmatch` patterns) that a task may name as its image, besides those in its folder. An
    image of a container engine is named, not a path."""
    max_cpus: Positive | None = None
    """Cores of a sandbox. None: those of the machine."""
    max_memory: Count | None = None
    """Bytes of memory of a sandbox. None: a quarter of the machine's."""
    max_disk: Count | None = None
    """Bytes of files of a sandbox, which are in memory. None: a quarter of the machine's memory."""
    max_processes: Count = 4096
    """Processes and threads of a sandbox."""
    max_timeout_s: Positive = 86400.0
    """Seconds of the agent, and of the tests."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Environments that come with the package."""

    max_env_workers: Count = 32
    """Number of environments that run at the same time."""
    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """Settings of `text2sql`."""
    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """Settings of `gsm8k_llm_judge`."""
    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Settings of `search`."""
    env_timeout: Positive = 600.0
    """Timeout of one call of an environment, in seconds. A trajectory that exceeds it is masked and counted."""
    task: TaskEnvConfig = field(default_factory=TaskEnvConfig)
    """Bounds of `task`."""
    packages: list[str] = field(default_factory=lambda: ["reasoning-gym:*"])
    """Environments `PACKAGE:NAME` of other packages that rows may name, as `fnmatch` patterns. A name is the address
    of a server that gives rewards, or a module that is imported."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """The environment of the rollouts."""

    env_class: str = "gsm8k"
    """Environment of the prompts whose row has no `env_class`."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings of the built-in environments."""


@dataclass
class InferenceEngineConfig(BaseConfig):
    """vLLM engines. Each engine uses tp·pp·dp GPUs."""

    model_dtype: Annotated[str, OneOf("bfloat16", "float16", "float32", "auto")] = "bfloat16"
    """Data type of the engine's weights. On CPU: float32."""
    run_engines_locally: bool = True
    """Start engines in this cluster. False: use the engines at `remote_urls` or `external_server_urls`."""
    num_engines: Count = 1
    """Number of engines; if not set with `colocate_all`, as many as fill the policy's GPUs."""
    backend: str = "vllm"
    """The inference library: `vllm`, or an engine that a plugin registered."""
    weight_sync_backend: str = device.NCCL
    """Transport of weights to the engines: `nccl`, `gloo`, or one that a plugin registered. On CPU: gloo. With
    `colocate_all`, nccl and gloo are replaced by CUDA IPC between a rank and the engine on its GPU; with several
    nodes, or `data_parallel_size` above 1, ranks first exchange the weights that these engines need."""
    weight_transfer_threshold_cuda_ipc_GB: Positive = 1.0
    """No effect: the trainer chooses the size of weight buckets."""
    tensor_parallel_size: Count = 1
    """tp: tensor-parallel size of each engine."""
    pipeline_parallel_size: Count = 1
    """pp: pipeline-parallel size of each engine."""
    expert_parallel_size: Count = 1
    """ep: expert-parallel size of each engine, 1 or data_parallel_size · tensor_parallel_size."""
    data_parallel_size: Count = 1
    """dp: data-parallel size of each engine."""
    async_engine: bool = True
    """No effect: engines are always asynchronous."""
    vllm_v1_disable_multiproc: bool = True
    """No effect: `trainer.deterministic` makes sampling reproducible."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of common prefixes. Each weight sync resets it."""
    enable_chunked_prefill: bool = True
    """Split the prefill of long prompts into chunks that are batched with decoding."""
    max_num_batched_tokens: Count = 8192
    """Maximum number of tokens that an engine processes in one step."""
    enforce_eager: bool = False
    """Do not use CUDA graphs: decoding takes 2 to 4 times as long, with a smaller log-prob mismatch to the trainer.
    True on CPU."""
    fully_sharded_loras: bool = False
    """Shard both LoRA matrices over tp in the engine."""
    enable_ray_prometheus_stats: bool = False
    """Publish engine metrics through Ray's Prometheus exporter."""
    gpu_memory_utilization: Annotated[float, Bounds(0, 1, open_low=True)] = 0.8
    """Share of GPU memory that an engine may use."""
    max_num_seqs: Count = 1024
    """Maximum number of sequences that an engine decodes at the same time."""
    remote_urls: list[str] = field(default_factory=list)
    """`host:port` of engines that this run does not start."""
    enable_http_endpoint: bool = False
    """Serve an OpenAI-compatible endpoint over all engines. If samples come from it, set
    `trainer.algorithm.temperature`."""
    http_endpoint_host: str = "127.0.0.1"
    """Address that the endpoint binds to."""
    http_endpoint_port: Annotated[int, Bounds(0, 65535)] = 8000
    """Port of the endpoint; 0 takes a free one."""
    served_model_name: str | None = None
    """Model name for requests to the endpoint. None: the model's path."""
    distributed_executor_backend: Annotated[str, OneOf("ray", "mp", "uni")] = "ray"
    """How an engine starts its ranks. `ray`: as processes on one node, as Ray actors on several nodes. `mp`: as
    processes. `uni`: its only rank runs in the engine's process. On CPU: mp."""
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine. Those that other keys set, or that this package cannot account for, are rejected."""
    override_existing_update_group: Annotated[str, OneOf("auto", "enable", "disable")] = "auto"
    """No effect: an update group of an earlier run is always replaced."""
    external_proxy_url: str | None = None
    """URL for sampling requests, if a router serves engines that this run does not start."""
    external_server_urls: list[str] | None = None
    """URLs of engines that this run does not start, for control requests: pause, weight updates, versions."""
    enable_return_routed_experts: bool = False
    """Engines return the experts of each token, for `moe_enable_routing_replay`. Needs engines that this run starts,
    prefix caching, and no pipeline parallelism."""
    return_sampling_support: bool | None = None
    """Engines return the tokens that top-p, top-k, min-p, grammars or lists of tokens left to sample from. The trainer
    computes its softmax over the same tokens, so that ratios and KL use the sampling distribution. None: true if such
    a setting is given, no penalty or bias changes the distribution, and the run starts its engines without an HTTP
    endpoint."""
    http_token_path: str | None = None
    """File with the endpoint's bearer token (mode 0600). None: a new file in the run's log folder."""
    enable_registry: bool = False
    """Engines that this run does not start can join and leave during the run (docs/guides/cluster.md)."""
    registry_host: str = "127.0.0.1"
    """Address that the registry of joining engines binds to."""
    registry_port: Annotated[int, Bounds(0, 65535)] = 8001
    """Port of the registry; 0 takes a free one."""
    registry_token_path: str | None = None
    """File with the registry's bearer token (mode 0600). None: a new file in the run's log folder."""
    registry_min_engines: NonNegativeInt = 0
    """Number of engines, in addition to the run's own, that must have joined before the run starts."""
    registry_silence_s: Positive = 60.0
    """Seconds without a heartbeat after which an engine is lost. An engine sends at least five heartbeats in that
    time."""
    registry_drain_s: Positive = 60.0
    """Seconds that the requests of a leaving engine may take. Unfinished requests restart on other engines."""
    restarts_per_hour: Count = 3
    """Maximum number of restarts of an engine within an hour, above which it is removed. The run ends without
    engines."""
    weight_sync_routes: bool = True
    """Send each engine worker only the slices of the weights that it needs, if vLLM's weight loaders can be recorded.
    Otherwise every worker receives all weights, and the log says why. Must be true with `colocate_all` if there are
    several nodes or `data_parallel_size` is above 1."""
    weight_sync_probe_interval: NonNegativeInt = 20
    """Weight syncs between two probes. In a probe trainer and engines compute log-probs of the same tokens, which must
    agree. 0: only after the first sync."""
    weight_sync_probe_limit: Positive | None = None
    """Maximum mean log-prob mismatch between trainer and engines in a probe, in nats. None: the limit that rounding
    explains. Set it for a model with larger rounding errors, after verifying that its weights are correct."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls in answers of the endpoint (`hermes`, `qwen3_coder`, ...). Requests with `tools`
    need it. None: such requests are rejected."""


@dataclass
class SamplingParams(BaseConfig):
    """How tokens are sampled."""

    max_generate_length: Count = 1024
    """Maximum number of tokens generated per turn."""
    repetition_penalty: Positive = 1.0
    """Values above 1 make tokens that have already appeared less likely."""
    temperature: NonNegative = 1.0
    """Sampling temperature. 0 is greedy; training needs more than 0."""
    top_p: Annotated[float, Bounds(0, 1, open_low=True)] = 1.0
    """Sample from the smallest set of tokens whose probability is at least this."""
    min_p: Fraction = 0.0
    """Drop tokens whose probability is below this share of the most likely token's."""
    top_k: Annotated[int, Bounds(1, also=(-1, 0))] = -1
    """Sample from this many of the most likely tokens; -1 or 0: all."""
    logprobs: Annotated[int | None, Bounds(0, 1)] = 1
    """0 or 1: return the log-probability of the sampled token. None: return none."""
    stop: list[str] | None = None
    """Strings that end a generation."""
    additional_kwargs: dict[str, Any] | None = None
    """Further fields of vLLM's `SamplingParams`. A warning names those that change the distribution of training
    samples without a support (`return_sampling_support`)."""


@dataclass
class ChatTemplateConfig(BaseConfig):
    """A chat template that replaces that of the tokenizer."""

    source: Annotated[str, OneOf("name", "file")] = "name"
    """`name`: `name_or_path` is the name of a built-in template. `file`: it is the path of a Jinja file."""
    name_or_path: str | None = None
    """The template. None: that of the tokenizer."""


@dataclass
class AgentConfig(BaseConfig):
    """`generator.name=agent`: commands in sandboxes (docs/guides/agents.md)."""

    command: list[str] = field(default_factory=list)
    """Command of the agent. `{text}` in a word is the text of the task."""
    sandbox: str = "namespaces"
    """Where it runs: `namespaces`, `docker`, or a plugin's."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Folders in the sandbox, read-only: path there → path here."""
    at_once: Count | None = None
    """Sandboxes at the same time. None: by cores and memory."""
    stdin: bool = False
    """The command can read what an agent may see of the row on stdin, as JSON: `prompt`, and as `extras` its column
    `agent`. False: stdin is empty."""
    timed_out_reward: float | None = 0.0
    """Reward of a trajectory that reached its time, which its agent can bring about. None: it is no sample."""
    context_full_reward: float | None = 0.0
    """Reward of a trajectory whose last prompt did not fit into the context, likewise."""
    reasoning_parser: str | None = None
    """vLLM's parser of thinking in answers (`qwen3`, `deepseek_r1`, …). None: thinking is a part of the text. This key
    and the following ones hold for generators of plugins, too."""
    max_calls: Count = 10_000
    """Requests of a trajectory. An agent that wants more has failed, with reward 0; so for the next two keys."""
    max_samples: Count = 2_000
    """Sampled answers of a trajectory."""
    max_tokens: Count = 4_000_000
    """Sampled tokens of a trajectory."""
    max_connections: Count = 64
    """Requests of a trajectory at once. Further ones are refused with status 429."""


@dataclass
class GeneratorConfig(BaseConfig):
    """Generation of trajectories from prompts."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The engines."""
    n_samples_per_prompt: Count = 5
    """Number of responses sampled for each prompt."""
    batched: bool = False
    """Generate single-turn responses in one call instead of one agent loop per prompt."""
    max_turns: Count = 1
    """Maximum number of turns of the policy in one trajectory."""
    max_input_length: Count | None = None
    """Maximum number of context tokens at the start of a turn. None: `trainer.max_prompt_length`, which a single turn
    requires."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tokenizer.apply_chat_template`."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling in training."""
    use_conversation_multi_turn: bool = True
    """Each turn and observation is a separate chat message. False: all are parts of one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the end-of-sequence token to a turn that ended at a stop string."""
    eval_sampling_params: SamplingParams | None = None
    """Sampling in evaluation. None: greedy. If its `max_generate_length` is not set, it is that of training."""
    eval_n_samples_per_prompt: Count = 1
    """Number of responses per prompt in evaluation."""
    zero_reward_on_non_stop: bool = False
    """Truncated responses get reward 0."""
    apply_overlong_filtering: bool = False
    """Truncated responses are masked out of the loss (DAPO, arXiv:2503.14476)."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling of the engines. None: `trainer.rope_scaling`."""
    rope_theta: Positive | None = None
    """Base of the engines' rotary frequencies. None: `trainer.rope_theta`."""
    step_wise_trajectories: bool = False
    """Each turn becomes a separate training sequence with the advantage of the trajectory, which is one sample of
    rewards, penalties and filters. Losses and means per sequence (`gspo`, `sequence_mean`) are per turn."""
    merge_stepwise_output: bool = False
    """Merge consecutive turns of `step_wise_trajectories` if the prompt of the later turn begins with prompt and
    response of the earlier one."""
    name: str = "skyrl_gym"
    """The generator: `skyrl_gym`, `agent`, or one that a plugin registered."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """The agent."""
    min_token_in_rate: Annotated[float, Bounds(0, 1)] = 0.9
    """Of agents. Below it, the run stops."""
    max_infrastructure_share: Annotated[float, Bounds(0, 1)] = 0.5
    """Of agents' trajectories that ended by no fault of the agent. Above it, the run stops."""
    unaccounted_sampling: Annotated[str, OneOf("error", "warn")] = "error"
    """Penalties, biases, and truncation without a support (`return_sampling_support`) in samples to train on: tokens
    then come from another distribution than the trainer's softmax, and no ratio accounts for it."""
