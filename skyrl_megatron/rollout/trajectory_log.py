"""What is told of trajectories under way, so that they outlive the process, and go on in another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron.rollout.recorded import RecordedTurn


@dataclass(slots=True)
class PartialTrajectory:
    """What there is of one sample of an unfinished group."""

    turns: list[RecordedTurn] = field(default_factory=list)
    trajectory: Trajectory | None = None
    """The whole of it, where it is over."""


class TrajectoryLog(Protocol):
    """Keeps the turns of a batch's trajectories. A generator that asks it for what there is need not sample that."""

    def begun(self, id: TrajectoryID) -> PartialTrajectory:
        """Return what an earlier process left of a trajectory."""

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """Note that a trajectory went on behind its turns, or why it began anew."""

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """Keep a turn, the ``place``-th from 0, of a trajectory that goes on."""

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """Keep a trajectory that is over."""
