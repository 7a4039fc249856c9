"""The training loop: batch sizes, intervals, paths, and the roles it drives."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, Count, EverySteps, NonNegativeInt, OneOf, Positive
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.schema.algorithm import AlgorithmConfig
from skyrl_megatron.config.schema.models import CriticConfig, PlacementConfig, PolicyConfig, RefConfig, TeacherConfig

Tracker = Annotated[str, OneOf("wandb", "mlflow", "swanlab", "tensorboard", "console")]


@dataclass
class FullyAsyncConfig(BaseConfig):
    """Rollouts that run on while the policy trains (docs/guides/async.md)."""

    max_staleness_steps: NonNegativeInt = 4
    """Training steps by which a response may lag: sampled from the weights of step i, its oldest token included, it is
    trained on at step j ≤ i + this. 1: one step off. 0: nothing runs ahead, the run is the synchronous one."""
    num_parallel_generation_workers: Count = 768
    """Prompts generated at the same time. At most `train_batch_size · (max_staleness_steps + 1)` are under way or wait
    to be trained on."""
    adaptive_concurrency: bool = False
    """Generate only as many prompts at the same time as engines have places for (`max_num_seqs`), at most
    `num_parallel_generation_workers`: one less whenever requests are found waiting, one more while there is room. A
    response that waits in an engine only gets older."""
    enabled: bool = False
    """Sample while the policy trains. The other keys of this section have no effect without it."""
    stale_policy: Annotated[str, OneOf("wait", "drop", "retry")] = "wait"
    """What becomes of a prompt that is still being sampled at the last step which may train on it: the step waits for
    it; it is dropped; it is sampled again from newer weights."""
    clear_kv_cache_on_weight_sync: bool = False
    """Compute keys and values of requests in flight anew with each new weights; false: they go on with those that they
    have. Keys and values of old weights never become the prefix of another request."""
    rollouts_path: str | None = None
    """Folder, on a file system, of the groups that were sampled, which a resumed run does not sample again; null:
    `ckpt_path/rollouts`. Needed where `ckpt_path` is an address."""
    keep_rollouts: bool = False
    """Keep groups that checkpoints have trained on, so that the whole run can be repeated with `replay_from`; false:
    only from its last checkpoints on. The folder then holds all that was ever sampled."""
    replay_from: str | None = None
    """Folder of the groups of another run (its `rollouts_path`): the same groups are trained in the same steps, and
    nothing is sampled. With the same configuration the numbers are the same, bit for bit."""


@dataclass
class HealingConfig(BaseConfig):
    """Lost ranks that are replaced while the run goes on (docs/guides/healing.md)."""

    enabled: bool = False
    """Start a rank whose process is gone again, in its place, and repeat what was under way; false: the run ends, and
    the same command continues from its last checkpoint."""
    copies: Annotated[str, OneOf("neighbour", "none")] = "neighbour"
    """Where a lost rank's state comes from: `neighbour`: behind the updates of each step every rank copies its state
    to host memory, its own and that of the next rank (on another host, where there are several); `none`: from the
    last checkpoint, which all go back to."""
    max_times: Count = 3
    """Healings within `within_steps` steps, above which the run ends."""
    within_steps: Count = 10
    """See `max_times`."""


@dataclass
class TrainerConfig(BaseConfig):
    """One run.

    Sizes count prompts: each step takes `train_batch_size` prompts, samples `n_samples_per_prompt` responses of each,
    and makes `train_batch_size / policy_mini_batch_size` optimizer steps per epoch over them.
    """

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Devices of each role."""
    sequence_parallel_backend: str = "ulysses"
    """Sequence parallelism of FSDP backends. No effect here."""
    strategy: Annotated[str, OneOf("megatron", "fsdp", "fsdp2")] = "megatron"
    """`fsdp` and `fsdp2` run Megatron's equivalent: data parallelism alone with a distributed optimizer."""
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
    """Recompute activations in the backward pass, as `transformer_config_kwargs.recompute_*` say; false: never."""
    gradient_checkpointing_use_reentrant: bool = False
    """Variant of torch's checkpointing. No effect here: Megatron has its own."""
    seed: NonNegativeInt = 42
    """Seed of data order, sampling, dropout and random weights."""
    resume_mode: Annotated[str | None, OneOf("none", "latest", "from_path")] = "latest"
    """Start anew (`none` or null), from the newest complete checkpoint in `ckpt_path` of the run that
    `latest_ckpt_global_step.txt` names, or from `resume_path`. What another run left there is named and left alone."""
    resume_path: str | None = None
    """A `global_step_N` folder, for `resume_mode=from_path`."""
    log_path: str = "/tmp/skyrl-logs"
    """Logs go to `log_path/project_name/run_name/`. On several nodes: a shared file system."""
    ckpt_path: str = field(default_factory=lambda: os.path.expanduser("~/ckpts/"))
    """Folder, or `s3://`/`gs://` address, of the checkpoints."""
    max_ckpts_to_keep: Annotated[int, Bounds(1, also=(-1,))] = -1
    """Older checkpoints of this run than the last so many are removed; -1 keeps all."""
    ckpt_interval: EverySteps = 10
    """Checkpoint every so many steps; -1 or 0: at the end only."""
    hf_save_interval: EverySteps = -1
    """Export the policy as a Hugging Face folder every so many steps; -1 or 0: never."""
    export_path: str = field(default_factory=lambda: os.path.expanduser("~/exports/"))
    """Folder of Hugging Face exports and dumps."""
    bf16: bool = True
    """Parameters and activations in bfloat16, with fp32 master weights; false: all in fp32. On CPU: false, also when
    set."""
    epochs: Count = 1
    """Passes over the training prompts."""
    update_epochs_per_batch: Count = 1
    """Passes of optimizer steps over the responses of one step."""
    train_batch_size: Count = 1024
    """Prompts per step."""
    policy_mini_batch_size: Count = 256
    """Prompts per optimizer step of the policy; divides `train_batch_size`."""
    critic_mini_batch_size: Count = 256
    """Prompts per optimizer step of the critic; divides `train_batch_size`."""
    micro_train_batch_size_per_gpu: Count = 1
    """Sequences per forward-backward pass on one data-parallel rank, unless `max_tokens_per_microbatch` is set."""
    micro_forward_batch_size_per_gpu: Count = 1
    """Sequences per forward-only pass on one data-parallel rank, unless `max_tokens_per_microbatch` is set."""
    update_ref_every_epoch: bool = False
    """Give the reference the policy's weights after each epoch. Checkpoints then hold them too."""
    use_sample_packing: bool = True
    """Lay sequences end to end instead of padding them. `remove_microbatch_padding` is another name for it."""
    eval_batch_size: Count = 1024
    """Prompts generated at the same time in evaluation."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: EverySteps = 5
    """Evaluate every so many steps; -1 or 0: never."""
    max_prompt_length: Count = 512
    """Tokens; longer prompts are dropped and counted."""
    flash_attn: bool = True
    """Fused attention kernels, the best installed; false: unfused, not with context parallelism. On CPU: false."""
    disable_fast_tokenizer: bool = False
    """No effect: transformers has one kind of tokenizer since version 5."""
    project_name: str = "skyrl"
    """Project, for trackers and the log folder."""
    run_name: str = "test_run"
    """Run, for trackers and the log folder."""
    logger: Tracker | list[Tracker] = "wandb"
    """Tracker, or a list of several, beside `metrics.jsonl`, TensorBoard and console, which every run writes. wandb,
    mlflow and swanlab are extras of the package; wandb without `WANDB_API_KEY` is left out."""
    dump_data_batch: bool = False
    """Write the tensors of each training batch to `export_path`."""
    dump_eval_results: bool = True
    """Write prompts, responses and scores of each evaluation to `export_path`."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary scaling, in the form of a Hugging Face configuration. None: the model's own."""
    rope_theta: Positive | None = None
    """Base of the rotary frequencies. None: the model's own."""
    max_training_steps: Count | None = None
    """Finish the run after so many steps. None: after `epochs`."""
    max_tokens_per_microbatch: Annotated[int, Bounds(1, also=(-1,))] = -1
    """Tokens of packed sequences per micro-batch, never exceeded; -1: the `micro_*_batch_size_per_gpu` count."""
    logprobs_chunk_size: Count | None = 1024
    """Tokens whose logits are turned into log-probabilities at a time, which bounds memory. None: all at once."""
    fused_lm_head_logprob: bool = False
    """Compute log-probabilities from hidden states chunk by chunk, so that the full logits never exist."""
    deterministic: bool | None = None
    """Same configuration, seed and layout: the same run, bit for bit, at some cost in speed. None: true on CPU. What
    is sampled ahead of training (`fully_async`) depends on time."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hugging Face model or tokenizer."""
    phase_timeout_s: Positive = 1800.0
    """Seconds that a phase (generate, train, sync, …) may take before the run fails, naming rank and phase."""
    plugins: list[str] = field(default_factory=list)
    """Modules that every process of the run imports: they register losses, estimators, environments, generators,
    engines, transports or model families (docs/guides/plugins.md)."""
    hub_commits: dict[str, str] = field(default_factory=dict)
    """Commit of each repository of the Hugging Face hub that the run uses: `org/name@revision`, for data sets
    `datasets/org/name@revision`. Filled in when a run starts; one that is resumed keeps those of its checkpoint."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teachers."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the start of the run in which the critic learns and the policy stays as it is."""
    samples_per_step: NonNegativeInt = 8
    """Samples that are kept for the dashboard, with log-probs and advantages of each token; 0: none."""
    samples_per_run: Count = 2000
    """Samples of the whole run; with more steps, samples and expert loads are kept of fewer of them, evenly."""
    peak_flops_per_rank: Annotated[float | None, Bounds(0, open_low=True)] = None
    """FLOP/s of a rank's device at its best, which MFU relates to; unset: the published figure of known GPUs in bf16,
    and no MFU on others."""
    prometheus_port: Annotated[int | None, Bounds(1, 65535)] = None
    """Port on the loopback interface of the trainer's host where Prometheus finds the last numbers, at `/metrics`,
    with the bearer token in `prometheus_token` of the run's folder (Prometheus: `authorization.credentials_file`)."""
    opentelemetry_endpoint: str | None = None
    """Collector that gets each step as a trace, with a span for each phase of trainer, ranks and engines: the address
    of OTLP over HTTP, such as `http://127.0.0.1:4318`."""
    healing: HealingConfig = field(default_factory=HealingConfig)
    """Ranks that are lost."""
