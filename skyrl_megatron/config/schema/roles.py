"""Policy, reference and critic, and where their ranks are placed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.config.fields import Count, NonNegativeInt
from skyrl_megatron.config.schema.base import BaseConfig
from skyrl_megatron.config.schema.megatron import MegatronConfig
from skyrl_megatron.config.schema.model import ModelConfig
from skyrl_megatron.config.schema.optimizer import FSDPConfig, OptimizerConfig


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
