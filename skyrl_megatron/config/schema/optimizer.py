"""The optimizer, its learning-rate schedule, and the FSDP keys that scripts written for other backends still carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_megatron.config.fields import NonNegative, NonNegativeInt, OneOf
from skyrl_megatron.config.schema.base import BaseConfig


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
