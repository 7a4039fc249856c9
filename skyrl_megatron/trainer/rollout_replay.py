"""Repeat a run from what it recorded: the same groups in the same steps; nothing is sampled."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_megatron.config.rules.training_rules import rollouts_folder
from skyrl_megatron.config.schema.run import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.errors import ConfigError, JournalError, Problem
from skyrl_megatron.trainer.rollout_store import GroupStore
from skyrl_megatron.trainer.rollout_stream import Group, GroupLog
from skyrl_megatron.trainer.staleness import DoneGroups

KEY = "trainer.fully_async.replay_from"
_BATCH = ("trainer.train_batch_size", "generator.n_samples_per_prompt")
"""Settings that recorded groups do not fit otherwise."""
_WITHOUT_NUMBERS = (
    *(f"trainer.{name}" for name in ("fully_async.", "ckpt", "eval_", "hf_", "resume_", "log", "project_", "run_")),
    *(f"trainer.{name}" for name in ("export_path", "max_ckpts", "dump_", "phase_", "plugins", "hub_commits")),
    *(f"trainer.placement.{name}" for name in ("colocate_", "teacher_", "ref_")),
)
"""How the settings of the trainer begin that change no number of a step."""


class ReplayedRollouts:
    """What stands in the place of a ``RolloutStream``: its batches are those that the steps of another run took.

    ``prompt``: number → entry of the data. Raises ConfigError naming ``trainer.fully_async.replay_from`` for a folder
    without rollouts and for the run's own, JournalError for damage, CheckpointError while another process writes
    there.
    """

    group_log: GroupLog | None = None

    def __init__(self, cfg: SkyRLTrainConfig, prompt: Callable[[int], dict[str, Any]]) -> None:
        self.folder, self.cfg, self.prompt = Path(str(cfg.trainer.fully_async.replay_from)), cfg, prompt
        if missing := [part for part in ("groups", "schedule") if not (self.folder / part).is_dir()]:
            raise self._refused(f"has no folder {missing[0]}: name the rollouts of a run, its ckpt_path/rollouts")
        if os.path.realpath(self.folder) == os.path.realpath(rollouts_folder(cfg)[0]):
            raise self._refused("is where this run keeps its own groups: give it another trainer.ckpt_path")
        self.store = GroupStore(self.folder, keep_consumed=True, setting=KEY)
        self.steps = self.store.schedule.steps
        self.version, self.place = 0, DoneGroups()
        self._left: deque[int] = deque()

    @property
    def last_step(self) -> int:
        """The last step that is recorded."""
        return max(self.steps, default=0)

    def check(self, step: int) -> None:
        """Raise ConfigError where what was recorded cannot be trained on behind a step."""
        for key, recorded, here in self.differences():
            if key in _BATCH:
                fix = f"{KEY}={self.folder} was recorded with {recorded}: set it to that"
                raise ConfigError([Problem(key, here, fix)])
        if self.last_step <= step:
            raise self._refused(f"ends with step {self.last_step}, and this run goes on behind step {step}")
        for each in range(step + 1, self.last_step + 1):
            if lost := [number for number in self._taken(each) if not self.store.holds(number)]:
                raise self._refused(f"no longer has {len(lost)} groups of step {each}: {_LOST}")

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (key, recorded value, value here) of settings that change the numbers of a step."""
        here = dict(_flat(get_config_as_dict(self.cfg)))
        for settings in self.store.schedule.settings[-1:]:
            recorded = dict(_flat(settings.values))
            for key in here.keys() & recorded.keys():
                if here[key] != recorded[key] and (key in _BATCH or _decides(key)):
                    yield key, recorded[key], here[key]

    # ------------------------------------------------------------------ as a stream
    def start(
        self,
        version: int,
        *,
        oldest: int = 0,
        ahead: Iterable[int] = (),
        finished: Iterable[Group] = (),
        planned: Iterable[int] = (),
        begun: Mapping[int, int] | None = None,
    ) -> None:
        """Begin at ``version``. ``oldest``, ``ahead``: what :meth:`state` said."""
        self.place = DoneGroups(oldest, ahead)
        self.advance(version)

    async def take(self) -> list[Group]:
        """Return the next groups that the step took. Raises JournalError where it took no more, or the data has
        another prompt in a group's place."""
        batch = self.cfg.trainer.train_batch_size
        if len(self._left) < batch:
            raise JournalError(
                f"{self.folder}: step {self.version + 1} took {len(self._taken(self.version + 1))} groups, and here it"
                " needs more: replay with the configuration that it was recorded with"
            )
        return await asyncio.to_thread(self._read, [self._left.popleft() for _ in range(batch)])

    def give_back(self, groups: Sequence[Group]) -> None:
        """Take a batch back that is not trained."""

    def trained(self, groups: Sequence[Group]) -> list[int]:
        """Note that the step is over."""
        for each in self.steps[self.version + 1].groups:
            self.place.add(each.number)
        return []

    def advance(self, version: int) -> None:
        """Go on to the step behind ``version``."""
        self.version, self._left = version, deque(self._taken(version + 1))

    def staleness(self, groups: Iterable[Group]) -> list[int]:
        """Return how old each row is that is trained on now, in steps."""
        return [self.version - version for group in groups for version in group.versions]

    def metrics(self) -> dict[str, float]:
        """Return nothing: nobody waits."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the :class:`DoneGroups` of the run as plain values."""
        return self.place.state()

    async def close(self) -> None:
        """Give the folder back."""
        await asyncio.to_thread(self.store.close)

    def _taken(self, step: int) -> list[int]:
        """Return the numbers of the groups that a step took, in order; those that gave no rows were given up."""
        groups = self.steps[step].groups if step in self.steps else []
        return [group.number for group in groups if group.versions is not None]

    def _read(self, numbers: Sequence[int]) -> list[Group]:
        groups = []
        for number in numbers:
            record, entry = self.store.read(number), self.prompt(number)
            if record.uid != str(entry["uid"]):
                raise JournalError(
                    f"{self.folder}: group {number} is of prompt {record.uid}, and the data has {entry['uid']} there:"
                    " replay with the data, batch size and seed that it was recorded with"
                )
            groups.append(Group(number, entry, record.started))
            groups[-1].finish(record.output)
        return groups

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([Problem(KEY, self.folder, why)])


_LOST = (
    "checkpoints had them. Replay from a later checkpoint (trainer.resume_mode=from_path), or record with"
    " trainer.fully_async.keep_rollouts=true"
)


def _decides(key: str) -> bool:
    return key.startswith("trainer.") and not key.startswith(_WITHOUT_NUMBERS)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
