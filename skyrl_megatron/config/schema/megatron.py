"""Megatron-Core: parallel degrees, mixture-of-experts behaviour, gradient buffers, and fields passed straight on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import Count, NonNegative, OneOf
from skyrl_megatron.config.schema.base import BaseConfig

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
