"""Partial rollouts: a batch of prompts that ends when enough of them have all their samples.

The generator interrupts the others. Their finished turns are recorded, and so is the beginning of an unfinished turn:
its tokens, log-probs, versions, routes and support. A later batch continues after them, with newer weights; between
steps ``sources/oversampled.py`` keeps them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from skyrl_megatron.rollout.continuation import BegunTurn
from skyrl_megatron.rollout.episode import EarlyEndingLog, PartialTrajectory, Trajectory
from skyrl_megatron.rollout.interface import RecordedTurn, TrajectoryID


class PartialRollouts(EarlyEndingLog):
    """The ``TrajectoryLog`` of a batch that may end early, in memory.

    ``groups``: uid → repetition → what earlier batches sampled. It is changed in place. ``samples``: trajectories of a
    prompt. ``enough``: whether the batch may end, given the uids of the complete groups in the order of ``groups``.
    """

    def __init__(
        self,
        groups: Mapping[str, dict[int, PartialTrajectory]],
        samples: int,
        enough: Callable[[list[str]], bool],
    ) -> None:
        self.groups, self.samples, self.enough = groups, samples, enough
        self.counts: Counter[str] = Counter()
        """``resumed`` and ``restarted`` trajectories."""
        self.ended = asyncio.Event()
        """Set when the unfinished trajectories are to be interrupted."""
        self._left = {
            uid: samples - sum(sample.trajectory is not None for sample in samples_of_group.values())
            for uid, samples_of_group in groups.items()
        }

    @property
    def complete(self) -> list[str]:
        """Uids of the groups whose samples are all finished, in the order of ``groups``."""
        return [uid for uid, left in self._left.items() if not left]

    def look(self) -> bool:
        """Return whether the batch may end; from then on it is interrupted."""
        if not self.ended.is_set() and self.enough(self.complete):
            self.ended.set()
        return self.ended.is_set()

    def keep(self, id: TrajectoryID, begun: BegunTurn | None) -> None:
        """Record the beginning of an unfinished turn."""
        self._sample(id).begun = begun

    # ------------------------------------------------------------------ as a TrajectoryLog
    def stored(self, id: TrajectoryID) -> PartialTrajectory:
        """See ``TrajectoryLog``."""
        known = self.groups[id.instance_id].get(id.repetition_id)
        return PartialTrajectory() if known is None else dataclasses.replace(known, turns=list(known.turns))

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """See ``TrajectoryLog``."""
        self.counts["restarted" if restarted else "resumed"] += 1
        if restarted:
            self.groups[id.instance_id][id.repetition_id] = PartialTrajectory()

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """See ``TrajectoryLog``."""
        sample = self._sample(id)
        sample.turns, sample.begun = [*sample.turns[:place], turn], None

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """See ``TrajectoryLog``."""
        self.groups[id.instance_id][id.repetition_id] = PartialTrajectory(trajectory=trajectory)
        self._left[id.instance_id] -= 1
        self.look()

    def _sample(self, id: TrajectoryID) -> PartialTrajectory:
        return self.groups[id.instance_id].setdefault(id.repetition_id, PartialTrajectory())
