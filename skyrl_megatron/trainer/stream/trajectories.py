"""The trajectories of a group that is being sampled, as its generator tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron.rollout.recorded import RecordedTurn
from skyrl_megatron.rollout.trajectory_log import PartialTrajectory
from skyrl_megatron.trainer.stream.group import Group
from skyrl_megatron.trainer.stream.records import FinishedTrajectory, PartialTurn
from skyrl_megatron.trainer.stream.store import GroupStore


class GroupTrajectories:
    """A ``TrajectoryLog`` that keeps them in the store until the group is finished.

    ``samples``: how many the group has: with the last one the group itself is kept. ``begun``: repetition → what an
    earlier process left. ``counts``: gets ``resumed`` and ``restarted``.
    """

    def __init__(
        self,
        store: GroupStore,
        group: Group,
        samples: int,
        begun: Mapping[int, PartialTrajectory],
        counts: Counter[str],
    ) -> None:
        self.store, self.group, self.known, self.counts = store, group, begun, counts
        self.left = samples - sum(each.trajectory is not None for each in begun.values())

    def begun(self, id: TrajectoryID) -> PartialTrajectory:
        """See ``TrajectoryLog``."""
        return self.known.get(id.repetition_id) or PartialTrajectory()

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """See ``TrajectoryLog``."""
        self.counts["restarted" if restarted else "resumed"] += 1

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """See ``TrajectoryLog``; it is on the disk on return."""
        group = self.group
        await self.store.add(PartialTurn(group.number, group.uid, group.started, id.repetition_id, place, turn))

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """See ``TrajectoryLog``; it is on the disk on return."""
        group, self.left = self.group, self.left - 1
        if self.left:
            await self.store.add(
                FinishedTrajectory(group.number, group.uid, group.started, id.repetition_id, trajectory)
            )
