"""The rollouts of an asynchronous run on disk: finished groups, unfinished ones, and which step trained which groups.

A store has two journals in a folder: ``groups`` has the samples, ``schedule`` the groups that each step consumed
(``records.py``). A group is kept until no checkpoint can need it, that is, until a step consumed it at or
before the oldest checkpoint. A record is on disk when the method that records it returns.
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

from skyrl_megatron.config.resolve import rollouts_folder
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.data.folder_lock import FolderLock
from skyrl_megatron.data.journal import SEGMENT_BYTES, Journal
from skyrl_megatron.errors import JournalError
from skyrl_megatron.identity import Identity, claim
from skyrl_megatron.rollout.episode import PartialTrajectory, Trajectory
from skyrl_megatron.rollout.interface import RecordedTurn, TrajectoryID
from skyrl_megatron.sources.group import Group
from skyrl_megatron.sources.records import (
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


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state of a store from which a run resumes."""

    consumed: frozenset[int]
    """Numbers of the groups that steps consumed up to the checkpoint."""
    finished: list[int]
    """Numbers of the groups to consume next, in order: those of the lost steps first, then by time of completion."""
    lost: int
    """How many of them belong to lost steps."""
    partial: dict[int, PartialGroup]
    """Number → recorded part, for unfinished groups."""


class GroupStore:
    """The store in a folder, which one process at a time has open.

    ``keep_consumed``: remove nothing, so that the whole run can be replayed; ``setting``: the configuration key of the
    folder, for errors. Call coroutines on one event loop. Raises JournalError for damage or a full disk,
    CheckpointError while another process has the folder open.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_consumed: bool = False,
        setting: str = "trainer.ckpt_path",
    ) -> None:
        self.folder, self.keep_consumed = Path(folder), keep_consumed
        self.schedule = Schedule(self.folder / "schedule", setting=setting)
        try:
            self.journal = Journal(self.folder / "groups", segment_bytes=segment_bytes, setting=setting)
        except BaseException:
            self.schedule.close()
            raise
        self._finished: dict[int, int] = {}
        """Number → sequence number of the record of a finished group."""
        self._versions: dict[int, Spans] = {}
        self._unfinished: dict[int, list[int]] = {}
        """Number → sequence numbers of the turns and trajectories of an unfinished group."""
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ while groups are sampled
    async def add(self, record: PartialRecord) -> None:
        """Record a turn or a whole trajectory of an unfinished group."""
        sequence = await self.journal.append(partial(CODEC.encode, record))
        self._unfinished.setdefault(record.number, []).append(sequence)

    async def finished(self, group: FinishedGroup) -> None:
        """Record a finished group. Raises DataError with the name of a metric that cannot be recorded."""
        assert group.number not in self._finished, f"group {group.number} is finished already"
        self._finish(group, await self.journal.append(partial(CODEC.encode, group)))

    async def discard(self, number: int) -> None:
        """Discard the records of a group, which is sampled again."""
        sequences = self._unfinished.pop(number, [])
        if number in self._finished:
            sequences = [*sequences, self._finished.pop(number)]
            del self._versions[number]
        if sequences:
            # Void on disk before they are freed: a segment is only removed once all of its records are free, and a
            # process that starts in between would count these again.
            await self.schedule.discard(number, max(sequences) + 1)
            self.journal.release(sequences)

    # ------------------------------------------------------------------ while groups are consumed
    async def trained(self, step: int, numbers: Sequence[int], left_out: Collection[int] = ()) -> None:
        """Record the groups that a step took, in order; ``left_out``: those that it did not train on, including groups
        without rows. Call it before the checkpoint of the step is complete."""
        taken = [ConsumedGroup(number, number not in left_out, self._versions.get(number)) for number in numbers]
        unknown = [group.number for group in taken if group.trained and group.versions is None]
        assert not unknown, f"groups {unknown} were never finished"
        repeated = [number for number in numbers if number in self.schedule.taken_at]
        assert not repeated, f"groups {repeated} are consumed already"
        await self.schedule.record(ScheduledStep(step, taken))

    async def checkpoints(self, steps: Collection[int]) -> None:
        """Free the groups that none of the existing checkpoints can need. ``steps``: the steps of the checkpoints."""
        if not steps or self.keep_consumed:
            return
        until, taken_at = min(steps), self.schedule.taken_at
        for number in [*self._finished, *self._unfinished]:
            if number in taken_at and taken_at[number] <= until:
                if number in self._finished:
                    self.journal.release([self._finished.pop(number)])
                    del self._versions[number]
                self.journal.release(self._unfinished.pop(number, []))
        await asyncio.wrap_future(self.journal.compact())

    @property
    def has_groups(self) -> bool:
        """Whether the store has any record of a group."""
        return bool(self._finished or self._unfinished)

    def holds(self, number: int) -> bool:
        """Return whether the store has the rows of a group."""
        return number in self._finished

    def consumed(self) -> set[int]:
        """Return the numbers of the groups that steps consumed."""
        return set(self.schedule.taken_at)

    # ------------------------------------------------------------------ after a start
    async def recover(self, step: int) -> Recovered:
        """Resume from the checkpoint of a step, 0 for the start. Raises JournalError if needed groups were removed, or
        if the store does not belong to this checkpoint."""
        if missing := [number for number in self.schedule.later(step) if number not in self._finished]:
            raise JournalError(
                f"{self.folder}: {len(missing)} groups that were trained after step {step} are gone (the first is"
                f" {missing[0]}), because a later checkpoint was complete. Resume from a later one, or move the folder"
                " away to sample them again"
            )
        await self.schedule.resume(step)
        consumed = self.consumed()
        lost = [number for number in self.schedule.planned if number in self._finished]
        others = sorted(self._finished.keys() - consumed - set(lost), key=self._finished.__getitem__)
        partial = {number: self._partial(number) for number in self._unfinished if number not in consumed}
        return Recovered(frozenset(consumed), [*lost, *others], len(lost), partial)

    def read(self, number: int) -> FinishedGroup:
        """Return a finished group. Raises KeyError if it is not in the store."""
        return cast(FinishedGroup, CODEC.decode(self.journal.read(self._finished[number])))

    def close(self) -> None:
        """Release the folder. May be called twice."""
        self.schedule.close()
        self.journal.close()

    # ------------------------------------------------------------------ the index
    def _index(self) -> None:
        consumed = self.consumed()
        for sequence, record in self._records():
            if isinstance(record, FinishedGroup):
                self._finish(record, sequence)
            elif record.number not in self._finished and record.number not in consumed:
                self._unfinished.setdefault(record.number, []).append(sequence)
            else:
                self.journal.release([sequence])

    def _records(self) -> Iterator[tuple[int, Any]]:
        for sequence, payload in self.journal.records():
            record = CODEC.decode(payload)
            if sequence >= self.schedule.discarded.get(record.number, 0):
                yield sequence, record
            else:
                self.journal.release([sequence])

    def _finish(self, group: FinishedGroup, sequence: int) -> None:
        """Index a finished group. Its turns and trajectories are in its record too, so their records are freed."""
        self._finished[group.number] = sequence
        self._versions[group.number] = group.output.get("rollout_versions") or []
        self.journal.release(self._unfinished.pop(group.number, []))

    def _partial(self, number: int) -> PartialGroup:
        sequences = sorted(self._unfinished[number])
        records = [cast(PartialRecord, CODEC.decode(self.journal.read(sequence))) for sequence in sequences]
        group = PartialGroup(records[0].uid, min(record.started for record in records), {})
        for record in records:
            sample = group.samples.setdefault(record.repetition, PartialTrajectory())
            if isinstance(record, FinishedTrajectory):
                sample.trajectory = record.trajectory
                continue
            if record.place == 0:
                sample.turns, sample.trajectory = [], None
            if record.place == len(sample.turns):  # otherwise it belongs to an aborted attempt, and is void
                sample.turns.append(record.turn)
        return group


class GroupTrajectories:
    """A ``TrajectoryLog`` that stores the trajectories of a group until the group is finished.

    ``samples``: trajectories of the group; the last one is stored with the group itself. ``begun``: repetition → the
    recorded part from an earlier process. ``counts``: counts ``resumed`` and ``restarted`` trajectories.
    """

    def __init__(
        self,
        store: GroupStore,
        group: Group,
        samples: int,
        begun: Mapping[int, PartialTrajectory],
        counts: Counter[str],
    ) -> None:
        self.store, self.group, self.begun, self.counts = store, group, begun, counts
        self.left = samples - sum(sample.trajectory is not None for sample in begun.values())

    def stored(self, id: TrajectoryID) -> PartialTrajectory:
        """See ``TrajectoryLog``."""
        return self.begun.get(id.repetition_id) or PartialTrajectory()

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """See ``TrajectoryLog``."""
        self.counts["restarted" if restarted else "resumed"] += 1

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """See ``TrajectoryLog``. The turn is on disk on return."""
        group = self.group
        await self.store.add(PartialTurn(group.number, group.uid, group.started, id.repetition_id, place, turn))

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """See ``TrajectoryLog``. The trajectory is on disk on return."""
        group, self.left = self.group, self.left - 1
        if self.left:
            await self.store.add(
                FinishedTrajectory(group.number, group.uid, group.started, id.repetition_id, trajectory)
            )


CHECKPOINTS = 2
"""Groups are kept for this many newest checkpoints: a run resumes from the previous one if the last is damaged."""


@dataclass
class ResumedGroups:
    """The recorded groups that a resumed run does not sample again."""

    finished: list[Group] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    """Numbers of the finished groups that steps after the checkpoint took, in the same order."""
    begun: dict[int, int] = field(default_factory=dict)
    """Number → version of the oldest token, for partially sampled groups."""


class DurableGroups:
    """The store of a run, for its stream (as a ``GroupLog``) and its trainer.

    ``fresh``: remove an existing store; ``epoch``: number of a group → its epoch; ``identity``: of the run. Raises
    JournalError and CheckpointError as :class:`GroupStore` does, ConfigError for the store of another run.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        epoch: Callable[[int], int],
        *,
        fresh: bool,
        identity: Identity | None = None,
    ) -> None:
        folder, setting = rollouts_folder(cfg)
        if fresh:
            remove(folder, setting)
        if identity is not None:
            claim(setting, Path(folder), cfg, identity)
        self.epoch, self.cfg = epoch, cfg
        self.counts: Counter[str] = Counter()
        """``resumed`` and ``restarted`` trajectories since the last :meth:`metrics`."""
        self._begun: dict[int, PartialGroup] = {}
        self.store = GroupStore(folder, keep_consumed=cfg.trainer.fully_async.keep_rollouts, setting=setting)

    async def recover(self, step: int, recall: Callable[[int, str], dict[str, Any]]) -> ResumedGroups:
        """Resume from the checkpoint of a step; ``recall``: number and recorded uid → dataset entry. An empty store
        fits every step.

        Raises JournalError if the store does not belong to the checkpoint or to the data.
        """
        schedule, settings = self.store.schedule, get_config_as_dict(self.cfg)
        if not schedule.reached and not self.store.has_groups:
            await schedule.begin(step)
            await schedule.configure(step, settings)
            return ResumedGroups()
        recovered = await self.store.recover(step)
        await schedule.configure(step, settings)
        groups = []
        for number in recovered.finished:
            record = self.store.read(number)
            groups.append(Group(number, self._entry(number, record.uid, recall), record.started))
            groups[-1].finish(record.output)
        for number, unfinished in recovered.partial.items():
            self._entry(number, unfinished.uid, recall)
            if unfinished.started >= step - self.cfg.trainer.fully_async.max_staleness_steps:
                self._begun[number] = unfinished
        begun = {number: unfinished.started for number, unfinished in self._begun.items()}
        return ResumedGroups(groups, recovered.finished[: recovered.lost], begun)

    def _entry(self, number: int, uid: str, recall: Callable[[int, str], dict[str, Any]]) -> dict[str, Any]:
        """Return the dataset entry of a group. Raises JournalError if it is a different prompt."""
        entry = recall(number, uid)
        if uid != str(entry["uid"]):
            raise JournalError(
                f"{self.store.folder}: group {number} is of prompt {uid}, but the data has {entry['uid']} there:"
                " continue with the same data, batch size and seed, or set trainer.resume_mode=none to start again"
            )
        return entry

    async def trajectories(self, group: Group, samples: int) -> GroupTrajectories:
        """Return the log of a group's trajectories when its sampling begins. A recorded part is continued once; later
        attempts start from the beginning."""
        begun = self._begun.pop(group.number, None)
        if begun is None:
            await self.store.discard(group.number)
        return GroupTrajectories(self.store, group, samples, begun.samples if begun else {}, self.counts)

    def metrics(self) -> dict[str, float]:
        """Return ``async/…``: trajectories that resumed after recorded turns, or restarted, since the last call."""
        names = ("resumed", "restarted")
        counted = {f"async/{name}_trajectories": float(self.counts[name]) for name in names}
        self.counts.clear()
        return counted

    async def finished(self, group: Group) -> None:
        """Record a group. It replaces an earlier record of the same group."""
        assert group.output is not None
        if self.store.holds(group.number):
            await self.store.discard(group.number)
        await self.store.finished(
            FinishedGroup(group.number, group.uid, self.epoch(group.number), group.output, group.started)
        )

    async def trained(self, step: int, taken: Sequence[int], unused: Collection[int], given_up: Iterable[int]) -> None:
        """Record the groups that a step took, in order, the ``unused`` ones among them, and the groups that were given
        up since the previous step."""
        others = sorted(given_up)
        await self.store.trained(step, [*taken, *others], {*unused, *others})

    async def checkpoints(self, steps: Iterable[int]) -> None:
        """Free the groups that the newest complete checkpoints cannot need."""
        await self.store.checkpoints(sorted(steps)[-CHECKPOINTS:])

    async def close(self) -> None:
        """Release the folder."""
        await asyncio.to_thread(self.store.close)


def remove(folder: str, setting: str) -> None:
    """Remove a store. Raises CheckpointError while another process has it open."""
    aside = f"{folder}.removed"
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed here
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
