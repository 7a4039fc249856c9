"""The groups of an asynchronous run on disk: what its stream finished, what its steps took, and what a resumed run
goes on with."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_megatron.config.rules.fully_async import rollouts_folder
from skyrl_megatron.config.schema.root import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.errors import JournalError
from skyrl_megatron.runtime.checkpoint.lock import FolderLock
from skyrl_megatron.trainer.stream.group import Group
from skyrl_megatron.trainer.stream.records import FinishedGroup, PartialGroup
from skyrl_megatron.trainer.stream.store import GroupStore
from skyrl_megatron.trainer.stream.trajectories import GroupTrajectories

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
        for number, partial in recovered.partial.items():
            self._entry(number, partial.uid, prompt)
            if partial.started >= step - self.cfg.trainer.fully_async.max_staleness_steps:
                self._begun[number] = partial
        begun = {number: partial.started for number, partial in self._begun.items()}
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
