"""Saving and resuming a run: every role's ranks, the position in the data, and the trainer's own state.

One process drives it: the trainer's under Ray, rank 0 where all ranks share a process group. It keeps the folder; the
ranks write and read their shares when :class:`RoleRanks` calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.storage import Background
from skyrl_megatron.runtime.checkpoint.store import DATA, TRAINER_STATE, CheckpointStore, choose, json_bytes


class RoleRanks(Protocol):
    """All ranks of a trained role (``policy``, ``critic``). Each call runs on all, and one's error is raised."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def save_checkpoint(self, folder: str, step: int, *, background: bool) -> None:
        """Write every rank's share into ``folder`` (``RankWriter.write``)."""

    def wait_checkpoint(self) -> None:
        """Wait for background writes. Raises CheckpointError when one failed."""

    def load_checkpoint(self, folder: str) -> int:
        """Fill every rank's state from ``folder`` (``read_rank``) and return the step that it is of."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point that a run continues from. Models, optimizers, schedules and random states have been filled."""

    step: int
    folder: str
    data: dict[str, Any]
    trainer_state: dict[str, Any]


class Checkpointer:
    """Saves and resumes ``roles`` together, under ``root``; ``keep``: how many checkpoints stay, -1: all;
    ``hub_commits``: what the run read from the Hugging Face hub (``trainer.hub_commits``).

    ``asynchronous``: :meth:`save` returns once all ranks have copied their state; the rest happens behind the
    training. ``timeout_s``: for how long a save waits for the ranks' files. ``model_files``: path in a checkpoint →
    contents of the small files of the models (``config.json``, tokenizer), which a conversion of it needs.
    """

    def __init__(
        self,
        root: str | Path,
        roles: Mapping[str, RoleRanks],
        *,
        keep: int = -1,
        hub_commits: Mapping[str, str] | None = None,
        asynchronous: bool = False,
        timeout_s: float = 1800.0,
        model_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.store = CheckpointStore(root, keep=keep, hub_commits=hub_commits)
        self.roles = dict(roles)
        self.saved_step: int | None = None
        """The step last saved or resumed."""
        self._model_files = dict(model_files or {})
        self._asynchronous, self._timeout_s = asynchronous, timeout_s
        self._commit = Background("an asynchronous save")

    def save(
        self, step: int, data: Mapping[str, Any], trainer_state: Mapping[str, Any], *, last_step_finite: bool = True
    ) -> str | None:
        """Save step ``step`` and return its folder; None, with a warning, after a step that was not finite.

        ``data`` (position of the data loader) and ``trainer_state`` are plain JSON values and are taken as they are
        now. A save that is still under way is waited for. Raises CheckpointError when a rank or this process cannot
        write; of an asynchronous save, the next call or :meth:`finish` raises it.
        """
        self.finish()
        extras = {  # as bytes: later changes do not reach them
            DATA: json_bytes(data, DATA),
            TRAINER_STATE: json_bytes(trainer_state, TRAINER_STATE),
        } | self._model_files
        sizes = {name: ranks.world_size for name, ranks in self.roles.items()}
        folder = self.store.begin(step, sizes, last_step_finite=last_step_finite)
        if folder is None:
            return None
        try:
            for ranks in self.roles.values():
                ranks.save_checkpoint(folder, step, background=self._asynchronous)
        except BaseException:
            self.store.discard(step)
            raise

        def commit() -> None:
            self.store.commit(step, sizes, extras, timeout_s=self._timeout_s)

        if self._asynchronous:
            self._commit.start(commit)
        else:
            commit()
        self.saved_step = step
        return self.store.folder(step)

    def load(self, mode: str | None, path: str | None) -> Resumed | None:
        """Restore what ``mode`` and ``path`` (``trainer.resume_mode``, ``_path``) name; None: start anew.

        With ``latest``, a checkpoint that proves damaged while it is read is passed with a warning and the one before
        is read over it. Raises CheckpointError when checkpoints exist and none can be loaded, and for ``from_path``
        with one that cannot.
        """
        candidates = choose(self.store, mode, path)
        for found in candidates:
            try:
                for ranks in self.roles.values():
                    ranks.load_checkpoint(found.folder)
                data, state = (self.store.read_json(found, name) for name in (DATA, TRAINER_STATE))
            except CheckpointError as error:
                candidates.reject(str(error))
                continue
            self.saved_step = found.step
            self.store.continue_from(found)
            return Resumed(found.step, found.folder, data, state)
        return None

    def finish(self) -> None:
        """Wait until no save is under way. Raises CheckpointError when the last one failed."""
        try:
            if self._asynchronous:
                for ranks in self.roles.values():
                    ranks.wait_checkpoint()
        except CheckpointError:
            self._commit.wait(self._timeout_s)  # it meets the same failure and removes what was written
            raise
        self._commit.wait(self._timeout_s)

    def give_up(self, lost: Mapping[str, Collection[int]]) -> None:
        """End an asynchronous save that waits for ``lost`` ranks, by role; unless they had written all of theirs it is
        removed, and :attr:`saved_step` is the one before."""
        if not self._commit.busy or self.saved_step is None:
            return
        for role, ranks in lost.items():
            self.store.give_up(self.saved_step, role, ranks)
        try:
            self.finish()
        except CheckpointError:
            self.saved_step = next(iter(self.store.complete_steps()), None)

    def close(self) -> None:
        """Finish, and give the folder back to other runs."""
        try:
            self.finish()
        finally:
            self.store.close()
