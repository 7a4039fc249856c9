"""The rollouts of an asynchronous run on disk: finished groups, turns in progress, which step trained what.

Two journals in a folder. ``groups`` holds what was sampled, ``schedule`` what each step consumed
(:mod:`skyrl_megatron.trainer.stream.schedule`). A group stays until no checkpoint could need it: until it was consumed
at or before the step of the oldest one there is. Everything is on the disk when the method that records it returns.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from skyrl_megatron.config.rules.training_rules import rollouts_folder
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.errors import JournalError
from skyrl_megatron.rollout.episode import PartialTrajectory, Trajectory
from skyrl_megatron.rollout.interface import RecordedTurn, TrajectoryID
from skyrl_megatron.runtime.checkpoint.storage import FolderLock
from skyrl_megatron.trainer.journal import SEGMENT_BYTES, Journal
from skyrl_megatron.trainer.rollout_records import (
    CODEC,
    ConsumedGroup,
    FinishedGroup,
    FinishedTrajectory,
    PartialGroup,
    PartialRecord,
    PartialTurn,
    Schedule,
    ScheduledStep,
    Spans,
)
from skyrl_megatron.trainer.rollout_stream import Group


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


CHECKPOINTS = 2
"""Newest checkpoints that groups are kept for: a run resumes from the one before when the last is damaged."""


@dataclass
class Kept:
    """What a resumed run need not sample again."""

    finished: list[Group] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    """Numbers of those that steps took which the checkpoint does not have, in the order in which they did."""
    begun: dict[int, int] = field(default_factory=dict)
    """Number → version of the oldest token, of groups of which there are turns."""


class DurableGroups:
    """The store of a run, as its stream and its trainer use it (a ``GroupLog``).

    ``fresh``: begin without what is there, which is removed; ``epoch``: number of a group → its epoch. Raises
    JournalError and CheckpointError as :class:`GroupStore` does.
    """

    def __init__(self, cfg: SkyRLTrainConfig, epoch: Callable[[int], int], *, fresh: bool) -> None:
        folder, setting = rollouts_folder(cfg)
        if fresh:
            remove(folder, setting)
        self.epoch, self.cfg = epoch, cfg
        self.counts: Counter[str] = Counter()
        """``resumed`` and ``restarted`` trajectories since :meth:`metrics` told of them."""
        self._begun: dict[int, PartialGroup] = {}
        self.store = GroupStore(folder, keep_consumed=cfg.trainer.fully_async.keep_rollouts, setting=setting)

    async def recover(self, step: int, prompt: Callable[[int], dict[str, Any]]) -> Kept:
        """Go on from the checkpoint of a step; ``prompt``: number → entry of the data. An empty store fits any.

        Raises JournalError where the store is not that of the checkpoint or of the data.
        """
        schedule, settings = self.store.schedule, get_config_as_dict(self.cfg)
        if not schedule.reached and not self.store.has_groups:
            await schedule.begin(step)
            await schedule.configure(step, settings)
            return Kept()
        recovered = await self.store.recover(step)
        await schedule.configure(step, settings)
        groups = []
        for number in recovered.finished:
            record = self.store.read(number)
            groups.append(Group(number, self._entry(number, record.uid, prompt), record.started))
            groups[-1].finish(record.output)
        for number, unfinished in recovered.partial.items():
            self._entry(number, unfinished.uid, prompt)
            if unfinished.started >= step - self.cfg.trainer.fully_async.max_staleness_steps:
                self._begun[number] = unfinished
        begun = {number: unfinished.started for number, unfinished in self._begun.items()}
        return Kept(groups, recovered.finished[: recovered.lost], begun)

    def _entry(self, number: int, uid: str, prompt: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """Return the entry of the data that a group is of. Raises JournalError where it is another one's."""
        entry = prompt(number)
        if uid != str(entry["uid"]):
            raise JournalError(
                f"{self.store.folder}: group {number} is of prompt {uid}, and the data has {entry['uid']} there: go on"
                " with the same data, batch size and seed, or start with trainer.resume_mode=none"
            )
        return entry

    async def trajectories(self, group: Group, samples: int) -> GroupTrajectories:
        """Return what keeps the trajectories of a group of so many, as its sampling begins. What there is of it is
        gone on with once: an attempt after that begins anew."""
        begun = self._begun.pop(group.number, None)
        if begun is None:
            await self.store.discard(group.number)
        return GroupTrajectories(self.store, group, samples, begun.samples if begun else {}, self.counts)

    def metrics(self) -> dict[str, float]:
        """Return ``async/…``: trajectories that went on behind recorded turns, or could not, since the last call."""
        names = ("resumed", "restarted")
        counted = {f"async/{name}_trajectories": float(self.counts[name]) for name in names}
        self.counts.clear()
        return counted

    async def finished(self, group: Group) -> None:
        """Record a group; one that is sampled again takes the place of what there was."""
        assert group.output is not None
        if self.store.holds(group.number):
            await self.store.discard(group.number)
        await self.store.finished(
            FinishedGroup(group.number, group.uid, self.epoch(group.number), group.output, group.started)
        )

    async def trained(self, step: int, taken: Sequence[int], unused: Collection[int], given_up: Iterable[int]) -> None:
        """Record the groups that a step took, in order, of which it did not train on ``unused``, and those that were
        given up since the step before."""
        others = sorted(given_up)
        await self.store.trained(step, [*taken, *others], {*unused, *others})

    async def checkpoints(self, steps: Iterable[int]) -> None:
        """Free what the newest of the complete checkpoints cannot need."""
        await self.store.checkpoints(sorted(steps)[-CHECKPOINTS:])

    async def close(self) -> None:
        """Give the folder back."""
        await asyncio.to_thread(self.store.close)


def remove(folder: str, setting: str) -> None:
    """Remove a store. Raises CheckpointError while another process has it open."""
    aside = f"{folder}.removed"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed below
    if not os.path.isdir(folder):
        return
    with ExitStack() as locks:
        for part in ("groups", "schedule"):
            if Path(folder, part).is_dir():
                locks.callback(FolderLock(os.path.join(folder, part), setting).release)
        try:
            os.rename(folder, aside)
        except OSError as error:
            raise JournalError(f"{folder} cannot be moved ({error.strerror}); check {setting}") from error
    shutil.rmtree(aside, ignore_errors=True)
