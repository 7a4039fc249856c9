"""Re-exports for scripts written for SkyRL."""

from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.rollout.interface import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    MetricsOutput,
    TrainingPhase,
    TrajectoryID,
)

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "MetricsOutput",
    "TrainingPhase",
    "TrajectoryID",
]
