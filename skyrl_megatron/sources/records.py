"""The records of an asynchronous run: groups, trajectories, and the schedule of which step trained which groups.

After a crash, the schedule decides which groups are trained already. A replay trains the same batches in the same
order.

``data/codec.py`` encodes them by the names of the dataclasses and of their fields, which are therefore part of the
format: journals of earlier versions must still be read.

A response token takes 4 bytes of id, 4 of log-prob, 1/8 of mask, and L · K routed experts of one or two bytes. A
reward of 0 takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_megatron.data.codec import Codec
from skyrl_megatron.data.journal import Journal
from skyrl_megatron.errors import JournalError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.continuation import BegunTurn
from skyrl_megatron.rollout.conversation import TrajectoryOutput
from skyrl_megatron.rollout.episode import PartialTrajectory, Trajectory
from skyrl_megatron.rollout.interface import GeneratorOutput, RecordedTurn, TrajectoryID
from skyrl_megatron.types import TokenSupport

type Spans = list[list[tuple[str, int, int]]]
"""For each row, its spans (policy version, first response token, token after the last)."""


@dataclass(slots=True)
class FinishedGroup:
    """All samples of a prompt."""

    number: int
    """Position of the prompt in the data, counted from 0 over all epochs."""
    uid: str
    epoch: int
    output: GeneratorOutput
    started: int = 0
    """The published version when its sampling began."""


@dataclass(slots=True)
class PartialTurn:
    """A turn of a trajectory in an unfinished group."""

    number: int
    """Number of the group."""
    uid: str
    started: int
    """The published version when the group's sampling began."""
    repetition: int
    place: int
    """Index of the turn. 0 after other turns restarts the trajectory. (The name of a field cannot change: records of
    earlier versions have it.)"""
    turn: RecordedTurn


@dataclass(slots=True)
class FinishedTrajectory:
    """A finished trajectory in an unfinished group."""

    number: int
    uid: str
    started: int
    repetition: int
    trajectory: Trajectory


type PartialRecord = PartialTurn | FinishedTrajectory


@dataclass(slots=True)
class PartialGroup:
    """The recorded part of an unfinished group."""

    uid: str
    started: int
    """No token of the group is older than this version."""
    samples: dict[int, PartialTrajectory]
    """Repetition → trajectory."""


CODEC = Codec(
    FinishedGroup,
    PartialTurn,
    FinishedTrajectory,
    RecordedTurn,
    Generation,
    Trajectory,
    TrajectoryOutput,
    TrajectoryID,
    TokenSupport,
    PartialGroup,
    PartialTrajectory,
    BegunTurn,
)
"""Codec of the journal of groups, and of the open groups in a checkpoint."""


@dataclass(slots=True)
class ConsumedGroup:
    """A group in the batch of a step."""

    number: int
    """Position of its prompt in the data."""
    trained: bool = True
    """False if dynamic sampling removed it from the batch."""
    versions: Spans | None = None
    """Versions of its rows; None if it has no rows."""


@dataclass(slots=True)
class ScheduledStep:
    """The groups of a step, in the order in which the step took them."""

    step: int
    """``global_step`` once the step is complete."""
    groups: list[ConsumedGroup]


@dataclass(slots=True)
class ResumedAt:
    """The run resumed from the checkpoint of a step: later recorded steps are void."""

    step: int


@dataclass(slots=True)
class Discarded:
    """The records of a group below a sequence number are void: the group is sampled again."""

    number: int
    below: int


@dataclass(slots=True)
class GivenSettings:
    """The configuration of the run from a step on."""

    step: int
    values: dict[str, Any]
    """The resolved configuration, of ``get_config_as_dict``."""


type _Entry = ScheduledStep | ResumedAt | Discarded | GivenSettings
_CODEC = Codec(ScheduledStep, ConsumedGroup, ResumedAt, Discarded, GivenSettings)


class Schedule:
    """The schedule of a run, in a folder. Raises JournalError and CheckpointError as :class:`Journal` does."""

    def __init__(self, folder: str | Path, *, setting: str = "folder") -> None:
        self.steps: dict[int, ScheduledStep] = {}
        """Step → its groups, without void steps."""
        self.taken_at: dict[int, int] = {}
        """Group → the step that took it."""
        self.discarded: dict[int, int] = {}
        """Group → sequence number below which its records are void."""
        self.planned: list[int] = []
        """Groups of void steps, in the order in which those steps took them, without groups that were taken again."""
        self.settings: list[GivenSettings] = []
        """The configuration of each start, unless it was unchanged."""
        self.reached = 0
        """The last step that was recorded or resumed from."""
        self.journal = Journal(folder, setting=setting)
        try:
            for _, payload in self.journal.records():
                self._apply(_CODEC.decode(payload))
        except BaseException:
            self.close()
            raise

    async def record(self, step: ScheduledStep) -> None:
        """Record a step. It is on disk on return."""
        await self._add(step)

    async def resume(self, step: int) -> None:
        """Resume after a step, and make later steps void. Raises JournalError if the schedule does not reach it."""
        if step > self.reached:
            raise JournalError(
                f"{self.journal.folder} ends with step {self.reached}, but the run resumes from step {step}: it does"
                " not belong to this checkpoint. Restore it, or move it away to continue without its groups"
            )
        if self.reached > step:
            await self._add(ResumedAt(step))

    def later(self, step: int) -> list[int]:
        """Return the sampled groups that later steps took, in order."""
        taken = (self.steps[later].groups for later in sorted(self.steps) if later > step)
        return [group.number for groups in taken for group in groups if group.versions is not None]

    async def begin(self, step: int) -> None:
        """Let an empty schedule begin after a step."""
        assert not self.reached, f"the schedule has reached step {self.reached}"
        if step:
            await self._add(ResumedAt(step))

    async def discard(self, number: int, below: int) -> None:
        """Make the records of a group below a sequence number void."""
        await self._add(Discarded(number, below))

    async def configure(self, step: int, values: dict[str, Any]) -> None:
        """Record the configuration of the run after a step."""
        if not self.settings or self.settings[-1].values != values:
            await self._add(GivenSettings(step, values))

    def close(self) -> None:
        """Release the folder."""
        self.journal.close()

    async def _add(self, entry: _Entry) -> None:
        await self.journal.append(partial(_CODEC.encode, entry))
        self._apply(entry)

    def _apply(self, entry: _Entry) -> None:
        if isinstance(entry, Discarded):
            self.discarded[entry.number] = entry.below
            return
        if isinstance(entry, GivenSettings):
            self.settings.append(entry)
            return
        self.reached = entry.step
        if isinstance(entry, ScheduledStep):
            self.steps[entry.step] = entry
            taken = {group.number for group in entry.groups}
            self.taken_at |= dict.fromkeys(taken, entry.step)
            if self.planned:
                self.planned = [number for number in self.planned if number not in taken]
        else:
            self.planned = [*self.later(entry.step), *self.planned]
            self.steps = {step: groups for step, groups in self.steps.items() if step <= entry.step}
            self.taken_at = {number: step for number, step in self.taken_at.items() if step <= entry.step}
