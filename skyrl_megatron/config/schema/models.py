"""The models of a run: weights, adapters, optimizer, Megatron-Core's options and parallel degrees, roles and their
placement.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, Count, NonNegative, NonNegativeInt, OneOf
from skyrl_megatron.config.load import BaseConfig


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters (Hu et al., arXiv:2106.09685). Off while `rank` is 0."""

    rank: NonNegativeInt = 0
    """Rank of the adapter matrices; 0 trains all weights."""
    alpha: Count = 16
    """The adapter's output is scaled by `alpha / rank`."""
    dropout: Annotated[float, Bounds(0, 1)] = 0.0
    """Probability that an input of the adapter is dropped in training."""
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder through which other systems hand adapters to engines. No effect here: adapters travel through memory."""
    target_modules: str = "all-linear"
    """Which linear layers get an adapter: `all-linear`, or names separated by commas (`linear_qkv,linear_proj`)."""
    exclude_modules: str | None = None
    """Names, separated by commas, taken out of `target_modules`."""
    init_method: Annotated[str, OneOf("kaiming", "xavier", "normal", "zero")] = "kaiming"
    """How the first adapter matrix starts. The second starts at zero, so that training begins from the base model;
    with `zero` it is the first that is zero."""
    sync_mode: Annotated[str | None, OneOf("memory", "merged")] = None
    """What travels to the engines: `memory` sends adapters alone, to engines that hold the base model (and
    `engine_init_kwargs.max_loras` versions at once, default 2 of each), `merged` the base weights with the adapter
    added. None: `merged` if `megatron_config.lora_config.merge_lora`, else `memory`."""
    train_attn: bool = True
    """Whether layers of attention get adapters."""
    train_mlp: bool = True
    """Whether dense layers, experts and shared experts get adapters."""
    train_unembed: bool = False
    """Whether `all-linear` includes the output layer. Needs `sync_mode=merged` and a model whose output layer is not
    its embedding."""
    use_rslora: bool = False
    """Scale by `alpha / √rank` (arXiv:2312.03732) instead of `alpha / rank`."""
    adapters: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Several adapters trained together: name → what it has otherwise than the others, of `lora` and of
    `policy.optimizer_config` (`{math: {}, code: {lr: 1e-5, alpha: 32}}`, or just `{math,code}`). A data row's
    `adapter` says which one answers it. More than one need `sync_mode=memory`."""
    adapter_path: str | None = None
    """A PEFT folder, or the name of one on the Hugging Face hub (`org/name` or `org/name@revision`), that training
    starts from. Must have the rank, alpha and layers that are set here, and be an adapter of `policy.model.path`."""


@dataclass
class ModelConfig(BaseConfig):
    """A Hugging Face model."""

    path: str | None = None
    """Folder with `config.json` and safetensors, or the name of a model on the Hugging Face hub (`org/name`); a folder
    of that name wins."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Train an adapter instead of the weights."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (`trainer.hub_commits` says which commit it is). None: the default branch;
    for the reference what the policy has, if it is the same model."""


@dataclass
class OptimizerConfig(BaseConfig):
    """Adam with decoupled weight decay. One step is one mini-batch."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and second moment, each in [0, 1)."""
    weight_decay: NonNegative = 1e-2
    """Fraction of a weight, times the learning rate, taken off at each step; norms and biases, of one dimension, are
    left alone unless `decay_norms_and_biases`."""
    max_grad_norm: NonNegative = 1.0
    """Gradients with a larger L2 norm (over all parameters) are scaled down to it; 0 never clips."""
    offload_after_step: bool = True
    """Move the optimizer state to host memory after each training step. Only where `colocate_all` shares GPUs."""
    num_warmup_steps: NonNegativeInt = 0
    """Mini-batch steps N in which the learning rate rises linearly, from lr/N at the first."""
    scheduler: Annotated[str, OneOf("constant", "constant_with_warmup", "linear", "cosine", "wsd")] = (
        "constant_with_warmup"
    )
    """Course of the learning rate after the warm-up. `wsd` keeps the peak, then decays over its last tenth."""
    min_lr: NonNegative = 0.0
    """Where a decaying schedule ends."""
    num_decay_steps: NonNegativeInt | None = None
    """Mini-batch step at which `min_lr` is reached, warm-up included. None: the last step of the run."""
    decay_norms_and_biases: bool = False
    """Weight decay reaches parameters of one dimension too, as in SkyRL's FSDP."""


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """Data types of an FSDP run; anything but the defaults is refused here, naming the Megatron key."""

    param_dtype: str = "bf16"
    """Type of the parameters in forward and backward. Here: `trainer.bf16`."""
    reduce_dtype: str = "fp32"
    """Type in which gradients are reduced. Here: `megatron_config.ddp_config.grad_reduce_in_fp32`."""
    buffer_dtype: str = "fp32"
    """Type of module buffers. Here they keep the type that Megatron gives them."""


@dataclass
class FSDPConfig(BaseConfig):
    """Keys of FSDP backends. `trainer.strategy=fsdp2` runs Megatron's equivalent (data parallelism with a distributed
    optimizer); values other than the defaults are refused, naming the Megatron key that does the same."""

    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory. Here: `optimizer_config_kwargs.optimizer_cpu_offload`."""
    reshard_after_forward: bool | int = True
    """Drop gathered parameters after the forward pass. Megatron keeps parameters whole on each rank."""
    fsdp_size: int = -1
    """Ranks over which parameters are sharded; -1 is all. Here: the parallel degrees of `megatron_config`."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Data types; None is the default mix."""
    wrap_policy: dict[str, Any] = field(default_factory=dict)
    """Which modules are sharded as a unit. Megatron shards by its own layer specification."""


DEFAULT_MEGATRON_OPTIMIZER_KWARGS: dict[str, Any] = {
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
"""Default of `optimizer_config_kwargs`."""

DEFAULT_TRANSFORMER_CONFIG_KWARGS: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False,
}
"""Default of `transformer_config_kwargs`."""


@dataclass
class MegatronDDPConfig(BaseConfig):
    """Megatron's gradient buffers (`DistributedDataParallelConfig`)."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 (4 bytes per parameter) instead of the parameters' type."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass still runs. CUDA only."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass runs. Needs `overlap_grad_reduce`. CUDA only."""
    average_in_collective: bool = True
    """Average inside the collective instead of scaling before it. No effect here: gradients are summed, and what they
    are a mean over is divided out in the loss."""


@dataclass
class MegatronTorchProfilerConfig(BaseConfig):
    """torch profiler around each training step."""

    enable: bool = False
    """Profile."""
    ranks: list[int] = field(default_factory=list)
    """Global ranks that write a trace; an empty list is all ranks."""
    save_path: str | None = None
    """Folder of the traces. None: `profile/` in the run's log folder."""


@dataclass
class MegatronLoraConfig(BaseConfig):
    """How LoRA adapters sit in Megatron's fused layers."""

    lora_type: Annotated[str, OneOf("lora", "canonical_lora")] = "lora"
    """`lora`: one adapter per fused layer (q, k and v together). `canonical_lora`: one per Hugging Face projection."""
    merge_lora: bool = True
    """Send base weights with the adapter added to the engines, instead of the adapter alone."""
    experts_shared_outer_loras: bool = False
    """Share the outer factor of expert adapters (the first of gate and up, the second of down) among all experts of a
    layer."""
    normalize_moe_lora: bool = False
    """Give adapters of experts the rank divided by the number of experts that a token goes to."""


@dataclass
class MTPConfig(BaseConfig):
    """The layer that predicts the token after the next (multi-token prediction), with which engines draft tokens."""

    train: bool = False
    """Train it beside the policy, on the tokens that the policy is trained on, with a loss of its own that reaches no
    other weight. False: it is carried through exports as it is."""
    loss_scale: NonNegative = 0.1
    """Weight of its loss, the mean cross-entropy of these tokens."""


@dataclass
class MegatronConfig(BaseConfig):
    """Layout and behaviour of one role's Megatron model.

    A rank belongs to tp·pp·cp groups for attention and dense layers and to etp·ep·pp groups for experts:
    `dp = world / (tp·pp·cp)` and `edp = world / (etp·ep·pp)`, both whole numbers.
    """

    tensor_model_parallel_size: Count = 1
    """tp: ranks that share each weight matrix of attention, dense layers, embedding and LM head."""
    pipeline_model_parallel_size: Count = 1
    """pp: pipeline stages."""
    context_parallel_size: Count = 1
    """cp: ranks that share each sequence. Needs `trainer.use_sample_packing`."""
    expert_model_parallel_size: Count = 1
    """ep: ranks over which the experts of a layer are spread."""
    expert_tensor_parallel_size: Count | None = None
    """etp: ranks that share each expert's matrices. None: 1."""
    moe_token_dispatcher_type: Annotated[str, OneOf("alltoall", "allgather", "flex")] = "alltoall"
    """How tokens reach their experts. `flex` needs DeepEP and CUDA; `allgather` cannot take packed micro-batches."""
    moe_router_load_balancing_type: Annotated[
        str, OneOf("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn")
    ] = "none"
    """Balancing of experts in training; the auxiliary losses weigh `moe_aux_loss_coeff`."""
    moe_grouped_gemm: bool = True
    """Compute a rank's experts in one grouped matrix product instead of one after the other."""
    moe_router_score_function: Annotated[str | None, OneOf("softmax", "sigmoid")] = None
    """How router logits become scores. None: as the model's own configuration says."""
    moe_router_enable_expert_bias: bool | None = None
    """Add a bias per expert when experts are chosen. None: as the model's own configuration says."""
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    """Gradient buffers."""
    torch_profiler_config: MegatronTorchProfilerConfig = field(default_factory=MegatronTorchProfilerConfig)
    """Profiler."""
    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    """How adapters are built; `policy.model.lora` says whether."""
    optimizer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_MEGATRON_OPTIMIZER_KWARGS)
    )
    """Fields of Megatron's `OptimizerConfig`, applied last."""
    transformer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_TRANSFORMER_CONFIG_KWARGS)
    )
    """Fields of Megatron's `TransformerConfig`, applied last. `transformer_impl: local` asks for our own layers on a
    GPU, where a run otherwise needs Transformer Engine."""
    empty_cuda_cache: bool | None = None
    """Return cached GPU memory after each training step. None: only where training and engines share GPUs."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration before Megatron's is derived from it."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """Other systems need true here to load optimizer state at another layout. Ours always can; false only warns."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """vpp: model chunks per pipeline stage (interleaved schedule). None: 1."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first stage, where the embedding also lives. None: an even share."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last stage, where the LM head also lives. None: an even share."""
    moe_router_dtype: Annotated[str | None, OneOf("fp32", "fp64")] = "fp32"
    """Type in which the router computes. None: the model's type."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Weight of the auxiliary balancing loss; without effect while `moe_router_load_balancing_type` is `none`."""
    moe_z_loss_coeff: NonNegative | None = None
    """Weight of the z-loss on router logits (arXiv:2202.08906). None or 0: none."""
    moe_enable_routing_replay: bool = False
    """Compute log-probs and gradients with given experts, those of `moe_routing_replay_source`."""
    moe_routing_replay_source: Annotated[str, OneOf("rollout", "trainer")] = "rollout"
    """Whose experts these are: those that the engine chose in the rollout (arXiv:2510.11370), which needs
    `generator.inference_engine.enable_return_routed_experts`; or those that the trainer itself took when it computed
    log-probs before the update, so that all optimizer steps on a batch have the same."""
    moe_routing_replay_missing: Annotated[str, OneOf("natural", "error")] = "natural"
    """What becomes of a token that counts in the loss and came without the engine's experts: the model routes it, or
    the step ends with an error."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction."""
    freeze_moe_router: bool = False
    """Leave router weights as they are."""
    moe_per_layer_logging: bool = False
    """Log balance and entropy of the router for each layer, beside their means."""
    async_dist_ckpt_save: bool = False
    """Write checkpoints in the background; training waits only for the copy of its own state."""


@dataclass
class PlacementConfig(BaseConfig):
    """How many devices each role takes. On a machine without GPUs one rank process stands for one GPU."""

    colocate_all: bool = True
    """Training and engines share the same GPUs and take turns. On CPU: false."""
    colocate_policy_ref: bool = True
    """Policy and reference share the same GPUs. On CPU: false."""
    policy_num_nodes: Count = 1
    """Nodes of the policy."""
    policy_num_gpus_per_node: Count = 1
    """GPUs of each of them; nodes × GPUs is the policy's world size."""
    critic_num_nodes: Count = 1
    """Nodes of the critic. Not given: the policy's."""
    critic_num_gpus_per_node: Count = 1
    """GPUs of each of them. Not given: the policy's."""
    ref_num_nodes: Count = 1
    """Nodes of the reference. Not given: the policy's."""
    ref_num_gpus_per_node: Count = 1
    """GPUs of each of them. Not given: the policy's."""
    teacher_num_nodes: Count = 1
    """Nodes of each teacher. Not given: the policy's."""
    teacher_num_gpus_per_node: Count = 1
    """GPUs of each of them. Not given: the policy's."""


@dataclass
class PolicyConfig(BaseConfig):
    """The model that is trained and sampled from."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"))
    """The model."""
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Keys of FSDP backends."""
    sequence_parallel_size: NonNegativeInt = 1
    """Ulysses degree of FSDP backends. No effect here: `megatron_config.context_parallel_size` splits sequences."""
    use_torch_compile: bool = False
    """No effect: log-probabilities come from a fused kernel."""
    record_memory: bool = False
    """Write snapshots of the GPU allocator to `ckpt_path/memory_snapshots/`, for pytorch.org/memory_viz."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Its layout."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration, as in `megatron_config.model_config_kwargs`, which wins."""


@dataclass
class CriticConfig(BaseConfig):
    """The value model, used by `advantage_estimator=gae`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model whose trunk the value head sits on. Path None: no critic."""
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """Its optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Keys of FSDP backends."""
    sequence_parallel_size: NonNegativeInt = 1
    """Ulysses degree of FSDP backends. No effect here."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Its layout. Left untouched, it is the policy's."""


@dataclass
class RefConfig(BaseConfig):
    """The frozen model that the KL term refers to."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model. Path None: the policy's."""
    sequence_parallel_size: NonNegativeInt = 1
    """Ulysses degree of FSDP backends. No effect here."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Keys of FSDP backends."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Its layout. Left untouched, it is the policy's."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration."""


@dataclass
class TeacherConfig(BaseConfig):
    """Frozen models that the policy learns from, token for token (`algorithm.distillation`)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The teacher. Path None: the first folder or hub name of `models`; without either there is no teacher on
    ranks."""
    models: dict[str, str] = field(default_factory=dict)
    """Several teachers, or one that is served elsewhere: name → folder, name on the Hugging Face hub, or the
    `http(s)://` address of an OpenAI-compatible engine that returns log-probs of prompts. A data row's `teacher` says
    which one judges it, default the first. Those on ranks share the settings of this section."""
    sequence_parallel_size: NonNegativeInt = 1
    """Ulysses degree of FSDP backends. No effect here."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Keys of FSDP backends."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Its layout. Left untouched, it is the policy's."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration."""
