"""Replay a run from its recorded rollouts: the same groups in the same steps, without sampling."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.config.resolve import rollouts_folder
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.errors import ConfigError, JournalError, Problem
from skyrl_megatron.identity import changes_numbers, read_identity, refuse_other, sampled_identity
from skyrl_megatron.rollout.interface import GeneratorOutput
from skyrl_megatron.sources.group import Group, GroupStream
from skyrl_megatron.sources.staleness import DoneGroups
from skyrl_megatron.sources.store import GroupStore

KEY = "trainer.fully_async.replay_from"
_BATCH = ("trainer.train_batch_size", "generator.n_samples_per_prompt")
"""Settings that must be the same as in the recording."""
_LOST = (
    "they were freed after a checkpoint. Replay from a later checkpoint (trainer.resume_mode=from_path), or record"
    " with trainer.fully_async.keep_rollouts=true"
)


class ReplayedRollouts(GroupStream):
    """A stream whose batches are the recorded batches of another run.

    ``recall``: number and recorded uid → dataset entry; ``observe``: as of a ``RolloutStream``. Raises ConfigError for
    ``trainer.fully_async.replay_from`` if the folder has no rollouts or belongs to this run, JournalError for damage,
    CheckpointError while another process writes there.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        recall: Callable[[int, str], dict[str, Any]],
        observe: Callable[[int, GeneratorOutput | None], None] = lambda number, output: None,
    ) -> None:
        self.folder, self.cfg = Path(str(cfg.trainer.fully_async.replay_from)), cfg
        self.recall, self.observe = recall, observe
        if missing := [part for part in ("groups", "schedule") if not (self.folder / part).is_dir()]:
            raise self._refused(f"has no folder {missing[0]}: set it to the rollouts of a run, its ckpt_path/rollouts")
        if os.path.realpath(self.folder) == os.path.realpath(rollouts_folder(cfg)[0]):
            raise self._refused("is where this run stores its own groups: set another trainer.ckpt_path")
        self.store = GroupStore(self.folder, keep_consumed=True, setting=KEY)
        self.steps = self.store.schedule.steps
        self.version, self.done = 0, DoneGroups()
        self._left: deque[int] = deque()

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return max(self.steps, default=0)

    def check(self, step: int) -> None:
        """Raise ConfigError if the recording cannot be trained on after a step, or was sampled with another model,
        tokenizer or template, which ``trainer.resume_other`` allows."""
        refuse_other(
            KEY,
            str(self.folder),
            read_identity(self.folder),
            self.cfg,
            sampled_identity(self.cfg),
            instead="Set those of the recording",
            to="train on it",
        )
        for key, recorded, here in self.differences():
            if key in _BATCH:
                fix = f"{KEY}={self.folder} was recorded with {recorded}: set {key}={recorded}"
                raise ConfigError([Problem(key, here, fix)])
        if self.last_step <= step:
            raise self._refused(f"ends with step {self.last_step}, but this run continues after step {step}")
        for later in range(step + 1, self.last_step + 1):
            if lost := [number for number in self._taken(later) if not self.store.holds(number)]:
                raise self._refused(f"no longer has {len(lost)} groups of step {later}: {_LOST}")

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (key, recorded value, value here) of the settings that differ and change the numbers of a step."""
        here = dict(_flat(get_config_as_dict(self.cfg)))
        for settings in self.store.schedule.settings[-1:]:
            recorded = dict(_flat(settings.values))
            for key in here.keys() & recorded.keys():
                if here[key] != recorded[key] and (key in _BATCH or _decides(key)):
                    yield key, recorded[key], here[key]

    # ------------------------------------------------------------------ as a stream
    def start(self, version: int, *, oldest: int = 0, ahead: Iterable[int] = ()) -> None:
        """See :class:`GroupStream`."""
        self.done = DoneGroups(oldest, ahead)
        self.advance(version)

    async def take(self) -> list[Group]:
        """Return the next recorded groups of the step. Raises JournalError if the step has no more, or if the data has
        another prompt at a group's position."""
        batch = self.cfg.trainer.train_batch_size
        if len(self._left) < batch:
            raise JournalError(
                f"{self.folder}: step {self.version + 1} took {len(self._taken(self.version + 1))} groups, but here it"
                " needs more: replay with the configuration of the recording"
            )
        return await asyncio.to_thread(self._read, [self._left.popleft() for _ in range(batch)])

    def give_back(self, groups: Sequence[Group]) -> None:
        """Do nothing: a batch that is not trained is not handed out again."""

    def trained(self, groups: Sequence[Group]) -> list[int]:
        """Mark the groups of the step as done."""
        for group in self.steps[self.version + 1].groups:
            self.done.add(group.number)
            self.observe(group.number, None)  # without effect for those with rows
        return []

    def advance(self, version: int) -> None:
        """Continue with the step after ``version``."""
        self.version, self._left = version, deque(self._taken(version + 1))

    def staleness(self, groups: Iterable[Group]) -> list[int]:
        """Return the staleness in steps of each row, if it were trained now."""
        return [self.version - version for group in groups for version in group.versions]

    def metrics(self) -> dict[str, float]:
        """Return {}: no group waits or is in flight."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the :class:`DoneGroups` as plain values."""
        return self.done.state()

    async def close(self) -> None:
        """Release the folder."""
        await asyncio.to_thread(self.store.close)

    def _taken(self, step: int) -> list[int]:
        """Return the numbers of the groups that a step took, in order, without those that have no rows."""
        groups = self.steps[step].groups if step in self.steps else []
        return [group.number for group in groups if group.versions is not None]

    def _read(self, numbers: Sequence[int]) -> list[Group]:
        groups = []
        for number in numbers:
            record = self.store.read(number)
            entry = self.recall(number, record.uid)
            if record.uid != str(entry["uid"]):
                raise JournalError(
                    f"{self.folder}: group {number} is of prompt {record.uid}, but the data has {entry['uid']} there:"
                    " replay with the data, batch size and seed of the recording"
                )
            groups.append(Group(number, entry, record.started))
            groups[-1].finish(record.output)
            self.observe(number, record.output)
        return groups

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([Problem(KEY, self.folder, why)])


def _decides(key: str) -> bool:
    """Return whether a setting changes what a step computes from given rollouts."""
    return key.startswith("trainer.") and not key.startswith("trainer.fully_async.") and changes_numbers(key)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
