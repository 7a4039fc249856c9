"""The groups of an asynchronous run on disk: what its stream finished, what its steps took, and what a resumed run
goes on with."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_megatron.config.rules.fully_async import rollouts_folder
from skyrl_megatron.config.schema.root import SkyRLTrainConfig
from skyrl_megatron.errors import JournalError
from skyrl_megatron.runtime.checkpoint.lock import FolderLock
from skyrl_megatron.trainer.stream.group import Group
from skyrl_megatron.trainer.stream.records import FinishedGroup
from skyrl_megatron.trainer.stream.store import GroupStore

CHECKPOINTS = 2
"""Newest checkpoints that groups are kept for: a run resumes from the one before when the last is damaged."""


@dataclass
class Kept:
    """What a resumed run need not sample again."""

    finished: list[Group] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    """Numbers of those that steps took which the checkpoint does not have, in the order in which they did."""


class DurableGroups:
    """The store of a run, as its stream and its trainer use it (a ``GroupLog``).

    ``fresh``: begin without what is there, which is removed; ``epoch``: number of a group → its epoch. Raises
    JournalError and CheckpointError as :class:`GroupStore` does.
    """

    def __init__(self, cfg: SkyRLTrainConfig, epoch: Callable[[int], int], *, fresh: bool) -> None:
        folder, setting = rollouts_folder(cfg)
        if fresh:
            remove(folder, setting)
        self.epoch = epoch
        self.store = GroupStore(folder, setting=setting)

    async def recover(self, step: int, prompt: Callable[[int], dict[str, Any]]) -> Kept:
        """Go on from the checkpoint of a step; ``prompt``: number → entry of the data. An empty store fits any.

        Raises JournalError where the store is not that of the checkpoint or of the data.
        """
        if not self.store.schedule.reached and not self.store.has_groups:
            await self.store.schedule.begin(step)
            return Kept()
        recovered = await self.store.recover(step)
        groups = []
        for number in recovered.finished:
            record, entry = self.store.read(number), prompt(number)
            if record.uid != str(entry["uid"]):
                raise JournalError(
                    f"{self.store.folder}: group {number} is of prompt {record.uid}, and the data has {entry['uid']}"
                    " there: go on with the same data, batch size and seed, or start with trainer.resume_mode=none"
                )
            group = Group(number, entry, record.started)
            group.finish(record.output)
            groups.append(group)
        return Kept(groups, recovered.finished[: recovered.lost])

    async def finished(self, group: Group) -> None:
        """Record a group; one that is sampled again takes the place of what there was."""
        assert group.output is not None
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
