"""The training loop: batch sizes, intervals, paths, roles."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import (
    Bounds,
    Count,
    EverySteps,
    NonNegative,
    NonNegativeInt,
    OneOf,
    Positive,
    Registered,
)
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
from skyrl_megatron.config.schema.models import CriticConfig, PlacementConfig, PolicyConfig, RefConfig, TeacherConfig

Tracker = Annotated[str, Registered("wandb", "mlflow", "swanlab", "tensorboard", "console")]
IDENTITY_PARTS = (
    *("verb", "model", "reference", "critic", "teacher", "tokenizer", "template", "data", "environment"),
    *("adapters", "optimizer", "critic_optimizer"),
)
"""Parts of the identity of a run (``identity.py``), which ``trainer.resume_other`` can name."""
OtherPart = Annotated[str, OneOf(*IDENTITY_PARTS)]


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Fully asynchronous rollouts: engines sample while the policy trains (docs/guides/async.md)."""

    max_staleness_steps: NonNegativeInt = 4
    """Maximum staleness of a response in training steps: if its oldest token is sampled from the weights of step i, it
    is trained on at step j ≤ i + this. 0: the run is synchronous."""
    num_parallel_generation_workers: Count = 768
    """Maximum number of prompts generated at the same time. At most `train_batch_size · (max_staleness_steps + 1)`
    prompts are being generated or wait for training."""
    adaptive_concurrency: bool = False
    """Adapt the number of prompts generated at the same time to the capacity of the engines (`max_num_seqs`). It is at
    most `num_parallel_generation_workers`: one less if requests are queued in an engine, one more if engines have free
    slots. Queued requests only increase the staleness of responses."""
    enabled: bool = False
    """Sample while the policy trains. Without it, the other keys of this section have no effect."""
    stale_policy: Annotated[str, OneOf("wait", "drop", "retry")] = "wait"
    """Handling of a prompt that is still being sampled at the last step that may train on it. `wait`: the step waits.
    `drop`: the prompt is dropped. `retry`: it is sampled again from newer weights."""
    clear_kv_cache_on_weight_sync: bool = False
    """Recompute the KV cache of running requests after each weight sync. False: they continue with the old KV cache.
    The KV cache of old weights is never used as the prefix of another request."""
    rollouts_path: str | None = None
    """Folder of the sampled groups, on a file system. A resumed run does not sample them again. None:
    `ckpt_path/rollouts`. Required if `ckpt_path` is an `s3://` or `gs://` address."""
    keep_rollouts: bool = False
    """Keep all sampled groups, so that `replay_from` can repeat the whole run. False: keep only those needed from the
    last checkpoints on."""
    replay_from: str | None = None
    """Folder of the sampled groups of another run (its `rollouts_path`). The same groups are trained in the same steps
    and nothing is sampled. With the same configuration the results are bitwise equal."""
    batches_ahead: Annotated[float | None, Bounds(1)] = None
    """Start no prompt while so many batches are finished or were begun in the last two steps. None: as many as
    `max_staleness_steps` allows. 1: samples are one step old if engines are fast enough."""


@dataclass
class OversamplingConfig(BaseConfig):
    """More prompts than a synchronous step trains (docs/guides/data.md)."""

    ratio: NonNegative = 0.0
    """Share of prompts sampled beyond `train_batch_size`. The step trains on the first complete ones. 0: it waits for
    all."""
    unfinished: Annotated[str, OneOf("keep", "drop")] = "keep"
    """The rest: the next step continues it, or not."""
    max_staleness_steps: Count = 4
    """Steps until a kept prompt is waited for."""


@dataclass
class HealingConfig(BaseConfig):
    """Recovery of lost ranks during the run (docs/guides/recovery.md)."""

    enabled: bool = False
    """Restart a rank whose process died, and repeat the interrupted phase. False: the run ends, and the same command
    continues from the last checkpoint."""
    copies: Annotated[str, OneOf("neighbour", "none")] = "neighbour"
    """Source of a lost rank's state. `neighbour`: after the updates of each step every rank copies its state to its
    own host memory and to that of a peer rank, on another host if there are several. `none`: the last checkpoint, to
    which all ranks return."""
    max_times: Count = 3
    """Maximum number of recoveries within `within_steps` steps, above which the run ends."""
    within_steps: Count = 10
    """Number of steps over which `max_times` counts."""


@dataclass
class TrainerConfig(BaseConfig):
    """Training.

    Batch sizes count prompts. Each step takes `train_batch_size` prompts, samples `n_samples_per_prompt` responses for
    each, and makes `train_batch_size / policy_mini_batch_size` optimizer steps per pass over them.
    """

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Devices of each role."""
    sequence_parallel_backend: str = "ulysses"
    """No effect: `megatron_config.context_parallel_size` splits sequences."""
    strategy: Annotated[str, OneOf("megatron", "fsdp", "fsdp2")] = "megatron"
    """`fsdp` and `fsdp2` run Megatron's equivalent: only data parallelism, with a distributed optimizer."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The objective."""
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Asynchronous rollouts."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass, as set by `transformer_config_kwargs.recompute_*`. False: never."""
    gradient_checkpointing_use_reentrant: bool = False
    """No effect: Megatron has its own recomputation."""
    seed: NonNegativeInt = 42
    """Seed of data order, sampling, dropout and random weights."""
    resume_mode: Annotated[str | None, OneOf("none", "latest", "from_path")] = "latest"
    """Checkpoint that the run starts from. `none` or null: start a new run. `latest`: continue from the newest
    complete checkpoint in `ckpt_path` of the run that `latest_ckpt_global_step.txt` names. `from_path`: continue from
    `resume_path`. Files of other runs in `ckpt_path` are reported and not changed."""
    resume_path: str | None = None
    """A `global_step_N` folder, for `resume_mode=from_path`."""
    log_path: str = "/tmp/skyrl-logs"
    """Logs are written to `log_path/project_name/run_name/`. On several nodes: a shared file system."""
    ckpt_path: str = field(default_factory=lambda: os.path.expanduser("~/ckpts/"))
    """Folder, or `s3://`/`gs://` address, of the checkpoints."""
    max_ckpts_to_keep: Annotated[int, Bounds(1, also=(-1,))] = -1
    """Number of newest checkpoints of this run to keep, besides the best (`best_metric`). -1: all."""
    ckpt_interval: EverySteps = 10
    """Number of steps between checkpoints; -1 or 0: only at the end."""
    hf_save_interval: EverySteps = -1
    """Number of steps between exports of the policy as a Hugging Face folder; -1 or 0: never."""
    export_path: str = field(default_factory=lambda: os.path.expanduser("~/exports/"))
    """Folder of Hugging Face exports and dumps."""
    bf16: bool = True
    """Parameters and activations in bfloat16, with fp32 master weights. False: everything in fp32. On CPU: always
    false."""
    epochs: Count = 1
    """Number of passes over the training prompts."""
    update_epochs_per_batch: Count = 1
    """Number of passes of optimizer steps over the responses of one step."""
    train_batch_size: Count = 1024
    """Prompts per step."""
    policy_mini_batch_size: Count = 256
    """Prompts per optimizer step of the policy; must divide `train_batch_size`."""
    critic_mini_batch_size: Count = 256
    """Prompts per optimizer step of the critic; must divide `train_batch_size`."""
    micro_train_batch_size_per_gpu: Count = 1
    """Sequences per forward-backward pass on one data-parallel rank, unless `max_tokens_per_microbatch` is set."""
    micro_forward_batch_size_per_gpu: Count = 1
    """Sequences per forward-only pass on one data-parallel rank, unless `max_tokens_per_microbatch` is set."""
    update_ref_every_epoch: bool = False
    """Copy the policy's weights to the reference after each epoch. Checkpoints then contain the reference too."""
    use_sample_packing: bool = True
    """Pack sequences end to end instead of padding them. `remove_microbatch_padding` is another name of this key."""
    eval_batch_size: Count = 1024
    """Number of prompts generated at the same time in evaluation."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: EverySteps = 5
    """Number of steps between evaluations; -1 or 0: never."""
    max_prompt_length: Count = 512
    """Maximum length of a prompt in tokens. Longer prompts are dropped and counted."""
    flash_attn: bool = True
    """Use the best installed fused attention kernel. False: unfused attention, which does not support context
    parallelism. On CPU: false."""
    disable_fast_tokenizer: bool = False
    """No effect: transformers has only fast tokenizers."""
    project_name: str = "skyrl"
    """Name of the project, for trackers and the log folder."""
    run_name: str = "test_run"
    """Name of the run, for trackers and the log folder."""
    logger: Tracker | list[Tracker] = "wandb"
    """Tracker, or list of trackers, in addition to `metrics.jsonl`, TensorBoard and console, which every run writes.
    wandb, mlflow and swanlab are extras of the package; a plugin may register others. wandb is skipped if
    `WANDB_API_KEY` is not set."""
    dump_data_batch: bool = False
    """Write the tensors of each training batch to `export_path`."""
    dump_eval_results: bool = True
    """Write prompts, responses and scores of each evaluation to `export_path`."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, in the form of a Hugging Face configuration. None: that of the model."""
    rope_theta: Positive | None = None
    """Base of the rotary frequencies. None: that of the model."""
    max_training_steps: Count | None = None
    """Number of steps after which the run ends. None: after `epochs`."""
    stop_when: str | None = None
    """Ends the run: `eval/all/avg_score >= 0.8`, with a checkpoint, and an export if `hf_save_interval` is set. The
    metrics are those of evaluations (`eval/…`, that of the initial policy too) and rewards (`reward/…`)."""
    best_metric: str | None = None
    """`eval/…` whose best checkpoint is kept too. It has the largest value (of a loss the smallest, docs/metrics.md),
    does not count in `max_ckpts_to_keep`, and is named by `ckpt_path/best_ckpt.json`."""
    max_tokens_per_microbatch: Annotated[int, Bounds(1, also=(-1,))] = -1
    """Maximum number of tokens of packed sequences in a micro-batch. -1: use `micro_*_batch_size_per_gpu`."""
    share_prefixes: Annotated[str, OneOf("auto", "always", "never")] = "auto"
    """Compute tokens once that several rows of a micro-batch begin with, such as the prompt of a group's samples or
    the calls before an agent's next one. Log-probs, losses and gradients are those of separate rows, to rounding.
    Set `max_tokens_per_microbatch`, which then counts such tokens once. `auto`: on the CPU, if that
    saves a tenth of the tokens and the model can."""
    logprobs_chunk_size: Count | None = 1024
    """Number of tokens whose log-probabilities are computed from logits at a time, to limit memory. None: all at
    once."""
    fused_lm_head_logprob: bool = False
    """Compute log-probabilities from hidden states in chunks, without the full logits."""
    deterministic: bool | None = None
    """Make runs with the same configuration, seed and layout bitwise equal, at some cost in speed. None: true on CPU,
    else false. Samples of fully asynchronous rollouts (`fully_async`) still depend on timing."""
    trust_remote_code: bool = False
    """Run the Python code of a Hugging Face model or tokenizer."""
    phase_timeout_s: Positive = 1800.0
    """Timeout of a phase (generate, train, sync, …) in seconds. The error names rank and phase."""
    plugins: list[str] = field(default_factory=list)
    """Modules that every process of the run imports. They register losses, estimators, environments, generators,
    engines, transports or model families (docs/guides/plugins.md)."""
    hub_commits: dict[str, str] = field(default_factory=dict)
    """Commit of each Hugging Face hub repository that the run uses: `org/name@revision`, for data sets
    `datasets/org/name@revision`. Filled in when a run starts. A resumed run keeps those of its checkpoint."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teachers."""
    critic_warmup_steps: NonNegativeInt = 0
    """Number of steps at the start of the run in which only the critic is trained."""
    samples_per_step: NonNegativeInt = 8
    """Number of samples per step that are recorded for the dashboard, with log-probs and advantages of each token. 0:
    none."""
    samples_per_run: Count = 2000
    """Maximum number of recorded samples of the run. If steps × `samples_per_step` exceeds it, samples and expert
    loads are recorded at evenly spaced steps."""
    peak_flops_per_rank: Annotated[float | None, Bounds(0, open_low=True)] = None
    """Peak FLOP/s of a rank's device, for MFU. None: the published bf16 value of known GPUs; no MFU on others."""
    expected_lengths: str | None = None
    """Tokens of the responses with which `--check` estimates a step: their mean, a file with a number in each line, or
    the `metrics.jsonl` of a run. None: as this run measured them before it is resumed, else half of the limit."""
    prometheus_port: Annotated[int | None, Bounds(1, 65535)] = None
    """Loopback port of the trainer's host that serves the latest metrics to Prometheus, at `/metrics`. The bearer
    token is in `prometheus_token` in the run's folder (Prometheus: `authorization.credentials_file`)."""
    opentelemetry_endpoint: str | None = None
    """OTLP/HTTP address of a collector, such as `http://127.0.0.1:4318`. It receives each step as a trace with a span
    for each phase of trainer, ranks and engines."""
    oversampling: OversamplingConfig = field(default_factory=OversamplingConfig)
    """Oversampling."""
    healing: HealingConfig = field(default_factory=HealingConfig)
    """Recovery of lost ranks."""
    exact_rollouts: bool = False
    """Engine and trainer give each token the same log-prob, bit for bit (docs/guides/routing-replay.md)."""
    max_rollout_gap: NonNegative | None = None
    """Largest log-prob mismatch of a step, in nats. None: 0 with `exact_rollouts`, else any."""
    rollout_gap_exceeded: Annotated[str, OneOf("error", "warn")] = "error"
    """Handling of a larger one. `warn`: the run continues, and each such step warns."""
    resume_other: list[OtherPart] = field(default_factory=list)
    """What may be another than that of the checkpoint: `[model,data]`. A run continues no checkpoint of another
    `verb` (`train`, `sft`, `dpo`, `reward`), `model`, `reference`, `critic`, `teacher`, `tokenizer`, chat `template`,
    training `data`, `environment`, `adapters`, `optimizer` or `critic_optimizer`, unless it is named here. Contents
    are compared, not paths. It also holds for `replay_from` and dumped batches; exports and evaluated rows replace
    none of another run."""
