"""Which group was consumed at which step: the schedule of a run, durable and never shortened.

It is what decides, after a crash, which groups are trained already, and from which a run can be repeated: with the
recorded groups, a replay trains the same batches in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import JournalError
from skyrl_megatron.trainer.stream.codec import Codec
from skyrl_megatron.trainer.stream.journal import Journal
from skyrl_megatron.trainer.stream.records import Spans


@dataclass(slots=True)
class ConsumedGroup:
    """A group in the batch of a step."""

    number: int
    """Place of its prompt in the data."""
    trained: bool = True
    """False where it was left out: dynamic sampling took it and did not train on it."""
    versions: Spans | None = None
    """Of its rows; None where it gave none."""


@dataclass(slots=True)
class ScheduledStep:
    """The groups of a step, in the order in which they were taken."""

    step: int
    """``global_step`` once the step is complete."""
    groups: list[ConsumedGroup]


@dataclass(slots=True)
class ResumedAt:
    """A run went on from the checkpoint of a step: what was recorded of later steps came to nothing."""

    step: int


@dataclass(slots=True)
class Discarded:
    """What the journal of groups holds of a group below a sequence number is void; it is sampled again."""

    number: int
    below: int


@dataclass(slots=True)
class GivenSettings:
    """The configuration that the run went on with, from a step on."""

    step: int
    values: dict[str, Any]
    """The resolved configuration, as ``get_config_as_dict`` gives it."""


type _Entry = ScheduledStep | ResumedAt | Discarded | GivenSettings
_CODEC = Codec(ScheduledStep, ConsumedGroup, ResumedAt, Discarded, GivenSettings)


class Schedule:
    """The schedule in a folder. Raises JournalError and CheckpointError as :class:`Journal` does."""

    def __init__(self, folder: str | Path, *, setting: str = "folder") -> None:
        self.steps: dict[int, ScheduledStep] = {}
        """By step, without those that came to nothing."""
        self.taken_at: dict[int, int] = {}
        """Number of a group → the step that took it."""
        self.discarded: dict[int, int] = {}
        """Number of a group → sequence number below which its records are void."""
        self.planned: list[int] = []
        """Groups of steps that came to nothing, in the order in which those took them; steps that took them again do
        not count."""
        self.settings: list[GivenSettings] = []
        """Those of each start, unless they were the same as before."""
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
        """Add a step; it is on the disk on return."""
        await self._add(step)

    async def resume(self, step: int) -> None:
        """Go on behind a step, and forget later ones. Raises JournalError where the schedule does not reach it."""
        if step > self.reached:
            raise JournalError(
                f"{self.journal.folder} ends with step {self.reached}, and the run resumes from step {step}: it does"
                " not belong to this checkpoint. Restore it, or move it away to go on without its groups"
            )
        if self.reached > step:
            await self._add(ResumedAt(step))

    def later(self, step: int) -> list[int]:
        """Return the sampled groups that steps behind one took, in order."""
        steps = [self.steps[each] for each in sorted(self.steps) if each > step]
        return [group.number for each in steps for group in each.groups if group.versions is not None]

    async def begin(self, step: int) -> None:
        """Make an empty schedule one that goes on behind a step which is recorded elsewhere, or nowhere."""
        assert not self.reached, f"the schedule has reached step {self.reached}"
        if step:
            await self._add(ResumedAt(step))

    async def discard(self, number: int, below: int) -> None:
        """Make the records of a group below a sequence number void."""
        await self._add(Discarded(number, below))

    async def configure(self, step: int, values: dict[str, Any]) -> None:
        """Note the configuration that the run goes on with behind a step."""
        if not self.settings or self.settings[-1].values != values:
            await self._add(GivenSettings(step, values))

    def close(self) -> None:
        """Give the folder back."""
        self.journal.close()

    async def _add(self, entry: _Entry) -> None:
        await self.journal.append(*_CODEC.encode(entry))
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
            self.steps = {step: each for step, each in self.steps.items() if step <= entry.step}
            self.taken_at = {number: step for number, step in self.taken_at.items() if step <= entry.step}


def read_schedule(folder: str | Path) -> list[ScheduledStep]:
    """Return the steps of a run that is over, first one first."""
    schedule = Schedule(folder)
    schedule.close()
    return [schedule.steps[step] for step in sorted(schedule.steps)]
