"""Agents that drive their own loop: gateway, sandboxes, environments of other packages."""

from skyrl_megatron.plugins import RECORDERS

RECORDERS.register_path(f"{__name__}.trajectory_records:TrajectoryRecorder")
