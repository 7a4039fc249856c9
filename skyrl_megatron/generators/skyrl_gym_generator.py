"""Re-exports for scripts written for SkyRL."""

from skyrl_megatron.rollout.conversation import TrajectoryOutput
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.rollout.interface import apply_overlong_filtering, get_metrics_from_generator_output
from skyrl_megatron.rollout.outputs import concatenate_generator_outputs, get_rollout_metrics, prepare_generator_input

__all__ = [
    "SkyRLGymGenerator",
    "TrajectoryOutput",
    "apply_overlong_filtering",
    "concatenate_generator_outputs",
    "get_metrics_from_generator_output",
    "get_rollout_metrics",
    "prepare_generator_input",
]
