"""What outlives a crash of an asynchronous run: groups that were sampled, and the turns of those under way.

Two journals in a folder. ``groups`` holds what was sampled, ``schedule`` what each step consumed
(:mod:`skyrl_megatron.trainer.stream.schedule`). A group stays until no checkpoint could need it: until it was consumed
at or before the step of the oldest one there is. Everything is on the disk when the method that records it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from skyrl_megatron.errors import JournalError
from skyrl_megatron.rollout.trajectory_log import PartialTrajectory
from skyrl_megatron.trainer.stream.journal import SEGMENT_BYTES, Journal
from skyrl_megatron.trainer.stream.records import (
    CODEC,
    FinishedGroup,
    FinishedTrajectory,
    PartialGroup,
    PartialRecord,
    Spans,
)
from skyrl_megatron.trainer.stream.schedule import ConsumedGroup, Schedule, ScheduledStep


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a resumed run stands."""

    consumed: frozenset[int]
    """Numbers of the groups that were trained or left out up to the checkpoint."""
    finished: list[int]
    """Numbers of the groups to consume next, in order: as the lost steps took them, then as they were finished."""
    lost: int
    """How many of them lost steps took."""
    partial: dict[int, PartialGroup]
    """Number → what there is of an unfinished group."""


class GroupStore:
    """The store in a folder, which one process at a time has open.

    ``limit_bytes``: of the sampled groups; ``keep_consumed``: remove nothing, so that the whole run can be replayed;
    ``setting``: what chooses the folder, for errors. Methods that are coroutines run on one event loop. Raises
    JournalError for damage, a full disk or the limit, CheckpointError while another process has the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        limit_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        keep_consumed: bool = False,
        setting: str = "trainer.ckpt_path",
    ) -> None:
        self.folder, self.keep_consumed = Path(folder), keep_consumed
        self.schedule = Schedule(self.folder / "schedule", setting=setting)
        try:
            self.journal = Journal(
                self.folder / "groups", segment_bytes=segment_bytes, limit_bytes=limit_bytes, setting=setting
            )
        except BaseException:
            self.schedule.close()
            raise
        self._finished: dict[int, int] = {}
        """Number → sequence of a finished group."""
        self._versions: dict[int, Spans] = {}
        self._pieces: dict[int, list[int]] = {}
        """Number → sequences of the turns and trajectories of a group that is not finished."""
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ while groups are sampled
    async def add(self, piece: PartialRecord) -> None:
        """Record a turn or a whole trajectory of an unfinished group."""
        sequence = await self.journal.append_made(partial(CODEC.encode, piece))
        self._pieces.setdefault(piece.number, []).append(sequence)

    async def finished(self, group: FinishedGroup) -> None:
        """Record a group that can be trained on. Raises DataError for metrics that cannot be recorded, naming them."""
        assert group.number not in self._finished, f"group {group.number} is finished already"
        self._finish(group, await self.journal.append_made(partial(CODEC.encode, group)))

    async def discard(self, number: int) -> None:
        """Forget a group, which is sampled again."""
        sequences = self._pieces.pop(number, [])
        if number in self._finished:
            sequences = [*sequences, self._finished.pop(number)]
            del self._versions[number]
        if sequences:
            await self.schedule.discard(number, max(sequences) + 1)
            self.journal.settle(sequences)

    # ------------------------------------------------------------------ while groups are consumed
    async def trained(self, step: int, numbers: Sequence[int], left_out: Collection[int] = ()) -> None:
        """Record what a step took, in order; ``left_out``: those that it did not train on, also groups that gave no
        rows. To be called before the checkpoint of the step is complete."""
        taken = [ConsumedGroup(number, number not in left_out, self._versions.get(number)) for number in numbers]
        unknown = [group.number for group in taken if group.trained and group.versions is None]
        assert not unknown, f"groups {unknown} were never finished"
        again = [number for number in numbers if number in self.schedule.taken_at]
        assert not again, f"groups {again} are consumed already"
        await self.schedule.record(ScheduledStep(step, taken))

    async def checkpoints(self, steps: Collection[int]) -> None:
        """Free what none of the checkpoints that there are could need."""
        if not steps or self.keep_consumed:
            return
        until, taken_at = min(steps), self.schedule.taken_at
        for number in [*self._finished, *self._pieces]:
            if number in taken_at and taken_at[number] <= until:
                if number in self._finished:
                    self.journal.settle([self._finished.pop(number)])
                    del self._versions[number]
                self.journal.settle(self._pieces.pop(number, []))
        await asyncio.wrap_future(self.journal.compact())

    @property
    def has_groups(self) -> bool:
        """Whether there is anything of any group."""
        return bool(self._finished or self._pieces)

    def holds(self, number: int) -> bool:
        """Return whether there are the rows of a group."""
        return number in self._finished

    def consumed(self) -> set[int]:
        """Return the numbers of the groups that steps took."""
        return set(self.schedule.taken_at)

    # ------------------------------------------------------------------ after a start
    async def recover(self, step: int) -> Recovered:
        """Go on from the checkpoint of a step; 0: from the start. Raises JournalError where groups that are needed are
        gone, or the store is not that of this checkpoint."""
        if missing := [number for number in self.schedule.later(step) if number not in self._finished]:
            raise JournalError(
                f"{self.folder}: {len(missing)} groups that were trained after step {step} are gone (the first is"
                f" {missing[0]}), because a later checkpoint was complete: resume from a later one, or move the folder"
                " away to sample them again"
            )
        await self.schedule.resume(step)
        consumed = self.consumed()
        lost = [number for number in self.schedule.planned if number in self._finished]
        others = sorted(self._finished.keys() - consumed - set(lost), key=self._finished.__getitem__)
        partial = {number: self._partial(number) for number in self._pieces if number not in consumed}
        return Recovered(frozenset(consumed), [*lost, *others], len(lost), partial)

    def read(self, number: int) -> FinishedGroup:
        """Return a finished group. Raises KeyError where there is none."""
        return cast(FinishedGroup, CODEC.decode(self.journal.read(self._finished[number])))

    def close(self) -> None:
        """Give the folder back. May be called twice."""
        self.schedule.close()
        self.journal.close()

    # ------------------------------------------------------------------ the index
    def _index(self) -> None:
        consumed = self.consumed()
        for sequence, record in self._records():
            if isinstance(record, FinishedGroup):
                self._finish(record, sequence)
            elif record.number not in self._finished and record.number not in consumed:
                self._pieces.setdefault(record.number, []).append(sequence)
            else:
                self.journal.settle([sequence])

    def _records(self) -> Iterator[tuple[int, Any]]:
        for sequence, payload in self.journal.records():
            record = CODEC.decode(payload)
            if sequence >= self.schedule.discarded.get(record.number, 0):
                yield sequence, record
            else:
                self.journal.settle([sequence])

    def _finish(self, group: FinishedGroup, sequence: int) -> None:
        self._finished[group.number] = sequence
        self._versions[group.number] = group.output.get("rollout_versions") or []
        self.journal.settle(self._pieces.pop(group.number, []))

    def _partial(self, number: int) -> PartialGroup:
        pieces = [cast(PartialRecord, CODEC.decode(self.journal.read(each))) for each in sorted(self._pieces[number])]
        found = PartialGroup(pieces[0].uid, min(piece.started for piece in pieces), {})
        for piece in pieces:
            sample = found.samples.setdefault(piece.repetition, PartialTrajectory())
            if isinstance(piece, FinishedTrajectory):
                sample.trajectory = piece.trajectory
                continue
            if piece.place == 0:
                sample.turns, sample.trajectory = [], None
            if piece.place == len(sample.turns):  # else of an attempt that ended while it was written, and is void
                sample.turns.append(piece.turn)
        return found
