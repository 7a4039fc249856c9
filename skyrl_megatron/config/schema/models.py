"""The models of a run: weights, adapters, optimizer, Megatron-Core's options, parallel degrees, placement of roles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Bounds, Count, NonNegative, NonNegativeInt, OneOf, Registered
from skyrl_megatron.config.load import BaseConfig
from skyrl_megatron.config.table import OPTIMIZERS


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Low-rank adapters (Hu et al., arXiv:2106.09685). Disabled if `rank` is 0."""

    rank: NonNegativeInt = 0
    """Rank of the adapter matrices. 0: train all weights, without an adapter."""
    alpha: Count = 16
    """The adapter's output is scaled by `alpha / rank`."""
    dropout: Annotated[float, Bounds(0, 1)] = 0.0
    """Dropout probability of the adapter's input in training."""
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """No effect: adapters are sent to engines through memory."""
    target_modules: str = "all-linear"
    """Which linear layers get an adapter: `all-linear`, or names separated by commas (`linear_qkv,linear_proj`)."""
    exclude_modules: str | None = None
    """Names, separated by commas, that are removed from `target_modules`."""
    init_method: Annotated[str, OneOf("kaiming", "xavier", "normal", "zero")] = "kaiming"
    """Initialisation of the adapter matrix A. B starts at zero, so that training starts from the base model. With
    `zero`, A is zero instead of B."""
    sync_mode: Annotated[str | None, OneOf("memory", "merged")] = None
    """What is sent to the engines. `memory`: only the adapters; engines hold the base model and
    `engine_init_kwargs.max_loras` adapter versions (default: 2 per adapter). `merged`: the base weights with the
    adapter added. None: `merged` if `megatron_config.lora_config.merge_lora`, else `memory`."""
    train_attn: bool = True
    """Whether attention layers get adapters."""
    train_mlp: bool = True
    """Whether dense layers, experts and shared experts get adapters."""
    train_unembed: bool = False
    """Whether `all-linear` includes the output layer. Needs `sync_mode=merged` and a model with untied embeddings."""
    use_rslora: bool = False
    """Scale by `alpha / √rank` (arXiv:2312.03732) instead of `alpha / rank`."""
    adapters: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Several adapters trained together: name → the settings of `lora` and `policy.optimizer_config` in which it
    differs (`{math: {}, code: {lr: 1e-5, alpha: 32}}`, or `{math,code}`). The column `adapter` of a data row names its
    adapter. More than one adapter needs `sync_mode=memory`."""
    adapter_path: str | None = None
    """PEFT folder, or name of an adapter on the Hugging Face hub (`org/name` or `org/name@revision`), from which
    training starts. It must be an adapter of `policy.model.path`, with the rank, alpha and layers set here."""


@dataclass
class ModelConfig(BaseConfig):
    """A Hugging Face model."""

    path: str | None = None
    """Folder with `config.json` and safetensors, or the name of a model on the Hugging Face hub (`org/name`). If a
    folder of that name exists, it is used."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""
    revision: str | None = None
    """Branch, tag or commit of a hub model (`trainer.hub_commits` records the commit). None: the default branch; for a
    reference with the policy's model, the policy's revision."""


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW or Muon. One optimizer step is one mini-batch."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and second moment, each in [0, 1)."""
    weight_decay: NonNegative = 1e-2
    """Decoupled weight decay: each step subtracts this times the learning rate times the weight. One-dimensional
    parameters (norms, biases) are not decayed unless `decay_norms_and_biases` is true."""
    max_grad_norm: NonNegative = 1.0
    """Maximum L2 norm of the gradients over all parameters; larger gradients are scaled down. 0: no clipping."""
    offload_after_step: bool = True
    """Move the optimizer state to host memory after each training step. Has an effect only with `colocate_all`."""
    num_warmup_steps: NonNegativeInt = 0
    """Number N of optimizer steps in which the learning rate increases linearly, from lr/N at the first."""
    scheduler: Annotated[str, OneOf("constant", "constant_with_warmup", "linear", "cosine", "wsd")] = (
        "constant_with_warmup"
    )
    """Schedule of the learning rate after the warm-up. `wsd` keeps the peak and decays over the last tenth."""
    min_lr: NonNegative = 0.0
    """Final learning rate of a decaying schedule."""
    num_decay_steps: NonNegativeInt | None = None
    """Optimizer step at which `min_lr` is reached, including the warm-up. None: the last step of the run."""
    decay_norms_and_biases: bool = False
    """Apply weight decay to one-dimensional parameters too, like SkyRL's FSDP backend."""
    optimizer: Annotated[str, Registered(*OPTIMIZERS)] = "adam"
    """`muon`: linear weights by Muon, without clipping; the rest by AdamW (`optimizer_config_kwargs.muon_*`)."""
    adam_lr: NonNegative | None = None
    """With `optimizer=muon`, peak rate of what AdamW trains. None: `lr`."""


@dataclass
class MixedPrecisionConfig(BaseConfig):
    """Data types of an FSDP run. Other values than the defaults are rejected; the message names the Megatron key."""

    param_dtype: str = "bf16"
    """FSDP's data type of parameters (use `trainer.bf16` instead)."""
    reduce_dtype: str = "fp32"
    """FSDP's data type of gradient reduction (use `megatron_config.ddp_config.grad_reduce_in_fp32` instead)."""
    buffer_dtype: str = "fp32"
    """FSDP's data type of module buffers, which Megatron chooses."""


@dataclass
class FSDPConfig(BaseConfig):
    """Keys of FSDP backends. `trainer.strategy=fsdp2` runs Megatron's equivalent, data parallelism with a distributed
    optimizer. Other values than the defaults are rejected; the message names the equivalent Megatron key."""

    cpu_offload: bool = False
    """FSDP's offload of parameters and optimizer state to host memory (use
    `optimizer_config_kwargs.optimizer_cpu_offload` instead)."""
    reshard_after_forward: bool | int = True
    """FSDP's release of gathered parameters (Megatron does not shard parameters over data-parallel ranks)."""
    fsdp_size: int = -1
    """FSDP's number of ranks over which parameters are sharded (use the parallel degrees of `megatron_config`
    instead)."""
    mixed_precision: MixedPrecisionConfig | None = None
    """Data types. None: the defaults."""
    wrap_policy: dict[str, Any] = field(default_factory=dict)
    """FSDP's units of sharding, which Megatron's layer specification decides."""


DEFAULT_MEGATRON_OPTIMIZER_KWARGS: dict[str, Any] = {
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
"""Default of `optimizer_config_kwargs`."""

AUTO = "auto"
"""`recompute_granularity`: as little as the memory of the GPUs allows, all layers if it is unknown."""
DEFAULT_TRANSFORMER_CONFIG_KWARGS: dict[str, Any] = {
    "recompute_granularity": AUTO,
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": True,
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
    """No effect: gradients are summed, and the loss contains the divisor."""


@dataclass
class MegatronTorchProfilerConfig(BaseConfig):
    """PyTorch profiler of each training step."""

    enable: bool = False
    """Enable the profiler."""
    ranks: list[int] = field(default_factory=list)
    """Global ranks that write a trace. Empty: all ranks."""
    save_path: str | None = None
    """Folder of the traces. None: `profile/` in the run's log folder."""


@dataclass
class MegatronLoraConfig(BaseConfig):
    """LoRA adapters in Megatron's fused layers."""

    lora_type: Annotated[str, OneOf("lora", "canonical_lora")] = "lora"
    """Adapters of a fused layer. `lora`: one adapter per fused layer (q, k and v together). `canonical_lora`: one per
    Hugging Face projection."""
    merge_lora: bool = True
    """Send base weights with the adapter added to the engines, instead of the adapter alone."""
    experts_shared_outer_loras: bool = False
    """All experts of a layer share the outer matrix of their adapters: A of the gate and up projections, B of the down
    projection."""
    normalize_moe_lora: bool = False
    """Divide the rank of expert adapters by the number of experts per token."""


@dataclass
class MTPConfig(BaseConfig):
    """Multi-token prediction (MTP): the layer that predicts the token after the next. Engines draft tokens with it."""

    train: bool = False
    """Train the MTP layer on the policy's training tokens, with a separate loss that changes no other weight. False:
    exports contain the layer unchanged."""
    loss_scale: NonNegative = 0.1
    """Weight of the MTP loss, the mean cross-entropy of these tokens."""


@dataclass
class MegatronConfig(BaseConfig):
    """Parallel layout and options of one role's Megatron model.

    Attention and dense layers use tp, pp, cp and `dp = world / (tp·pp·cp)`; experts use etp, ep, pp and
    `edp = world / (etp·ep·pp)`. dp and edp must be whole numbers.
    """

    tensor_model_parallel_size: Count = 1
    """tp: number of ranks that split each weight matrix of attention, dense layers, embedding and LM head."""
    pipeline_model_parallel_size: Count = 1
    """pp: number of pipeline stages."""
    context_parallel_size: Count = 1
    """cp: number of ranks that split each sequence. Needs `trainer.use_sample_packing`."""
    expert_model_parallel_size: Count = 1
    """ep: number of ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: Count | None = None
    """etp: number of ranks that split each expert's matrices. None: 1."""
    moe_token_dispatcher_type: Annotated[str, OneOf("alltoall", "allgather", "flex")] = "alltoall"
    """Token dispatcher of the experts. `flex` needs DeepEP, or HybridEP with
    `transformer_config_kwargs.moe_flex_dispatcher_backend=hybridep`; `allgather` does not support packed
    micro-batches."""
    moe_router_load_balancing_type: Annotated[
        str, OneOf("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn")
    ] = "none"
    """Load balancing of experts in training. The losses weigh every token alike. They compare the load of a
    micro-batch (`aux_loss`), of each sequence (`seq_aux_loss`), or of the micro-batches of all replicas so far in the
    step (`global_aux_loss`), and count the experts with the best scores, as Megatron does, also where a bias or groups
    choose others. `sinkhorn` balances the tokens of each rank alone, so routes depend on the layout."""
    moe_grouped_gemm: bool = True
    """Compute the experts of a rank in one grouped GEMM instead of one after another."""
    moe_router_score_function: Annotated[str | None, OneOf("softmax", "sigmoid")] = None
    """Score function of router logits. None: that of the model's configuration."""
    moe_router_enable_expert_bias: bool | None = None
    """Add a bias per expert when the router selects experts. None: as in the model's configuration. It is constant
    unless `transformer_config_kwargs.moe_router_bias_update_rate` is above 0."""
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    """Gradient buffers."""
    torch_profiler_config: MegatronTorchProfilerConfig = field(default_factory=MegatronTorchProfilerConfig)
    """Profiler."""
    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    """Structure of the adapters that `policy.model.lora` enables."""
    optimizer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_MEGATRON_OPTIMIZER_KWARGS)
    )
    """Fields of Megatron's `OptimizerConfig`. Fields that other keys set, or that nothing here reads, are rejected."""
    transformer_config_kwargs: dict[str, Any] = field(
        default_factory=lambda: copy.deepcopy(DEFAULT_TRANSFORMER_CONFIG_KWARGS)
    )
    """Fields of Megatron's `TransformerConfig`, with the same exceptions. `transformer_impl: local` uses this
    package's layers on GPUs instead of Transformer Engine's; `gradient_accumulation_fusion` concerns the latter. With
    `recompute_granularity: auto`, as few layers are recomputed as GPU memory allows (all if it is unknown)."""
    empty_cuda_cache: bool | None = None
    """Free the cached GPU memory of PyTorch after each optimizer step. None: only when state is offloaded, before
    other processes need the memory."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration. Engines get those of the policy too."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """No effect: optimizer state can always be loaded in another layout. False only gives a warning."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """vpp: number of model chunks per pipeline stage (interleaved schedule). None: 1."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Number of layers of the first stage, which also holds the embedding. None: an even share."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Number of layers of the last stage, which also holds the LM head. None: an even share."""
    moe_router_dtype: Annotated[str | None, OneOf("fp32", "fp64")] = "fp32"
    """Data type of the router. None: that of the model."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Weight of the load-balancing loss, which counts the experts with the best scores, without any bias or groups. No
    effect if `moe_router_load_balancing_type` is `none`."""
    moe_z_loss_coeff: NonNegative | None = None
    """Weight of the z-loss on router logits (arXiv:2202.08906). None or 0: no z-loss."""
    moe_enable_routing_replay: bool = False
    """Compute log-probs and gradients with recorded experts (routing replay), from `moe_routing_replay_source`."""
    moe_routing_replay_source: Annotated[str, OneOf("rollout", "trainer")] = "rollout"
    """Source of the recorded experts. `rollout`: the experts that the engine chose (arXiv:2510.11370); needs
    `generator.inference_engine.enable_return_routed_experts`. `trainer`: the experts that the trainer chose when it
    computed log-probs before the update, so that all optimizer steps on a batch use the same experts."""
    moe_routing_replay_missing: Annotated[str, OneOf("natural", "error")] = "natural"
    """Handling of loss tokens without recorded experts. `natural`: the router of the model chooses their experts.
    `error`: the step fails."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction."""
    freeze_moe_router: bool = False
    """Do not train the router weights. The bias per expert stays too."""
    moe_per_layer_logging: bool = False
    """Log load balance and entropy of the router of each layer, in addition to their means."""
    async_dist_ckpt_save: bool = False
    """Write checkpoints in the background. Training waits only until its state is copied."""
    moe_balance_experts: bool = False
    """Choose the rows of each micro-batch so that the EP ranks get equally many tokens, from the experts that
    `moe_enable_routing_replay` replays. Loss and gradients stay the same up to the order of sums."""
    moe_expert_moves: Annotated[str, OneOf("none", "auto", "shuffle")] = "none"
    """Move experts between ranks after a batch. `auto`: where the balance gained pays for it. `shuffle`: at random, a
    test."""


@dataclass
class PlacementConfig(BaseConfig):
    """Number of devices of each role. On a machine without GPUs, one rank process stands for one GPU."""

    colocate_all: bool = True
    """Training and engines share the same GPUs and take turns."""
    colocate_policy_ref: bool = True
    """Policy and reference share the same GPUs."""
    policy_num_nodes: Count = 1
    """Number of nodes of the policy."""
    policy_num_gpus_per_node: Count = 1
    """GPUs per node of the policy. Nodes × GPUs per node is the policy's world size."""
    critic_num_nodes: Count = 1
    """Number of nodes of the critic. Not set: that of the policy."""
    critic_num_gpus_per_node: Count = 1
    """GPUs per node of the critic. Not set: that of the policy."""
    ref_num_nodes: Count = 1
    """Number of nodes of the reference. Not set: that of the policy."""
    ref_num_gpus_per_node: Count = 1
    """GPUs per node of the reference. Not set: that of the policy."""
    teacher_num_nodes: Count = 1
    """Number of nodes of each teacher. Not set: that of the policy."""
    teacher_num_gpus_per_node: Count = 1
    """GPUs per node of each teacher. Not set: that of the policy."""


class RoleConfig(BaseConfig):
    """A model of a run: the settings that all roles have. Each class below is this block, with some other fields."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Keys of FSDP backends."""
    sequence_parallel_size: NonNegativeInt = 1
    """No effect: `megatron_config.context_parallel_size` splits sequences."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """Layout and Megatron options. Not set: those of the policy."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face configuration. `megatron_config.model_config_kwargs` overrides them."""


def role(first: str = "") -> Callable[[type[RoleConfig]], Any]:
    """Return a decorator that makes a dataclass of a role: the fields named in ``first``, then all others of the role
    and of :class:`RoleConfig`.

    A dataclass that inherits fields has those of its parent first. SkyRL's classes have another order each, on which
    positional arguments depend, so that the fields are copied instead.
    """

    def decorate(cls: type[RoleConfig]) -> Any:
        fields = {**RoleConfig.__annotations__, **cls.__annotations__}
        cls.__annotations__ = {name: fields[name] for name in [*first.split(), *fields]}
        for name in RoleConfig.__annotations__:
            if name not in cls.__dict__:
                setattr(cls, name, copy.copy(RoleConfig.__dict__[name]))
        return dataclass(cls)

    return decorate


@role("model optimizer_config fsdp_config sequence_parallel_size use_torch_compile record_memory")
class PolicyConfig(RoleConfig):
    """The model that is trained and sampled from."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct"))
    """The model."""
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    use_torch_compile: bool = False
    """No effect: log-probabilities come from a fused kernel."""
    record_memory: bool = False
    """Write snapshots of PyTorch's GPU memory allocator to `ckpt_path/memory_snapshots/`, for
    pytorch.org/memory_viz."""


@role("model optimizer_config fsdp_config sequence_parallel_size model_config_kwargs")
class CriticConfig(RoleConfig):
    """The value model, used by `advantage_estimator=gae`. It is the model with a value head. Path None: no critic."""

    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    """The optimizer."""


@role("model sequence_parallel_size")
class RefConfig(RoleConfig):
    """The frozen reference model of the KL term. Path None: the model is that of the policy."""


@role("model models sequence_parallel_size")
class TeacherConfig(RoleConfig):
    """Frozen teacher models of on-policy distillation (`algorithm.distillation`). Path None: the first folder or hub
    name of `models`; without one, no teacher runs on ranks."""

    models: dict[str, str] = field(default_factory=dict)
    """Several teachers: name → folder, name on the Hugging Face hub, or `http(s)://` address of an engine. The engine
    is OpenAI-compatible and returns log-probs of prompts. The column `teacher` of a data row names its teacher;
    default: the first. Teachers on ranks share the settings of this section."""
