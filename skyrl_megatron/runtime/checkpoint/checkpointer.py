"""Save and resume a run: the ranks of every role, the position in the data, and the trainer's state.

One process drives it: the trainer under Ray, or rank 0 if all ranks share a process group. It manages the folder. The
ranks write and read their parts when :class:`RoleRanks` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.storage import BackgroundTask
from skyrl_megatron.runtime.checkpoint.store import (
    DATA,
    ROLLOUTS,
    TRAINER_STATE,
    CheckpointStore,
    SavedCheckpoint,
    json_bytes,
    resume_candidates,
)


class RoleRanks(Protocol):
    """All ranks of a trained role (``policy``, ``critic``). Each call runs on all ranks and raises a rank's error."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def save_checkpoint(self, folder: str, step: int, *, background: bool) -> None:
        """Write every rank's part into ``folder`` (``RankWriter.write``)."""

    def wait_checkpoint(self) -> None:
        """Wait for background writes. Raises CheckpointError if one failed."""

    def load_checkpoint(self, folder: str) -> int:
        """Load every rank's state from ``folder`` (``read_rank``) and return its step."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point from which a run resumes. Models, optimizers, schedules and random states are already loaded."""

    step: int
    folder: str
    data: dict[str, Any]
    trainer_state: dict[str, Any]
    rollouts: bytes | None = None
    """The unfinished rollouts, if the run keeps some from step to step."""


class Checkpointer:
    """Saves and resumes ``roles`` together, under ``root``. ``keep``: number of checkpoints to keep, -1: all.
    ``hub_commits``: commits that the run read from the Hugging Face hub (``trainer.hub_commits``).

    ``asynchronous``: :meth:`save` returns once all ranks have copied their state, and writes in the background.
    ``timeout_s``: how long a save waits for the ranks' files. ``model_files``: path in a checkpoint → content of the
    models' small files (``config.json``, tokenizer), which a conversion needs. ``identity``: recorded in every
    manifest. ``accept`` is called with a checkpoint before it is loaded, and raises an error if it is of another run.
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
        identity: Mapping[str, dict[str, str]] | None = None,
        accept: Callable[[SavedCheckpoint], None] = lambda checkpoint: None,
    ) -> None:
        self.store = CheckpointStore(root, keep=keep, hub_commits=hub_commits, identity=identity)
        self._accept = accept
        self.roles = dict(roles)
        self.saved_step: int | None = None
        """The step that was last saved or resumed."""
        self._model_files = dict(model_files or {})
        self._asynchronous, self._timeout_s = asynchronous, timeout_s
        self._commit = BackgroundTask("an asynchronous save")

    def save(
        self,
        step: int,
        data: Mapping[str, Any],
        trainer_state: Mapping[str, Any],
        *,
        rollouts: bytes | None = None,
        last_step_finite: bool = True,
    ) -> str | None:
        """Save step ``step`` and return its folder; None, with a warning, if the step was not finite.

        ``data`` (position of the data loader) and ``trainer_state`` are plain JSON values, copied now; ``rollouts``:
        the unfinished rollouts. Waits for a save that is still in progress. Raises CheckpointError if a rank or this
        process cannot write; for an asynchronous save, the next call or :meth:`finish` raises it.
        """
        self.finish()
        extras = {  # as bytes: later changes do not reach them
            DATA: json_bytes(data, DATA),
            TRAINER_STATE: json_bytes(trainer_state, TRAINER_STATE),
        } | self._model_files
        if rollouts is not None:
            extras[ROLLOUTS] = rollouts
        sizes = {name: ranks.world_size for name, ranks in self.roles.items()}
        folder = self.store.begin(step, sizes, last_step_finite=last_step_finite)
        if folder is None:
            return None
        try:
            for ranks in self.roles.values():
                ranks.save_checkpoint(folder, step, background=self._asynchronous)
        except BaseException:
            # the ranks that did write have left files; nobody will complete this folder
            self.store.discard(step)
            raise

        def commit() -> None:
            self.store.commit(step, sizes, extras, timeout_s=self._timeout_s)

        # The ranks' files are awaited in a thread too: otherwise the fast ranks' steps would wait for the
        # slowest disk.
        if self._asynchronous:
            self._commit.start(commit)
        else:
            commit()
        self.saved_step = step
        return self.store.folder(step)

    def load(self, mode: str | None, path: str | None) -> ResumePoint | None:
        """Load the checkpoint that ``mode`` and ``path`` (``trainer.resume_mode``, ``_path``) select; None: start
        anew. Errors of ``accept`` are not caught.

        With ``latest``, a checkpoint that proves damaged during the load is skipped with a warning, and the previous
        one is loaded. Raises CheckpointError if checkpoints exist and none can be loaded, and for ``from_path`` if
        that one cannot be loaded.
        """
        candidates = resume_candidates(self.store, mode, path)
        for checkpoint in candidates:
            # an error of ``accept`` means another run's checkpoint: an older one of it is no better, so it is
            # not skipped
            self._accept(checkpoint)
            try:
                for ranks in self.roles.values():
                    ranks.load_checkpoint(checkpoint.folder)
                data, state = (self.store.read_json(checkpoint, name) for name in (DATA, TRAINER_STATE))
                rollouts = self.store.read_rollouts(checkpoint)
            except CheckpointError as error:
                candidates.reject(str(error))
                continue
            self.saved_step = checkpoint.step
            self.store.continue_from(checkpoint)
            return ResumePoint(checkpoint.step, checkpoint.folder, data, state, rollouts)
        return None

    def finish(self) -> None:
        """Wait until no save is in progress. Raises CheckpointError if the last save failed."""
        # the ranks first: their error says what went wrong, the commit's only that files are missing
        try:
            if self._asynchronous:
                for ranks in self.roles.values():
                    ranks.wait_checkpoint()
        except CheckpointError:
            self._commit.wait(self._timeout_s)  # it fails for the same reason and removes the folder
            raise
        self._commit.wait(self._timeout_s)

    def mark_best(self, metric: str, value: float) -> None:
        """Name the checkpoint of :attr:`saved_step` as the best by ``metric``, once it is complete."""
        self.finish()
        if self.saved_step is not None:
            self.store.mark_best(self.saved_step, metric, value)

    def drop_lost_ranks(self, lost: Mapping[str, Collection[int]]) -> None:
        """End an asynchronous save that waits for the ``lost`` ranks (by role).

        It is kept if they had written all their files. Otherwise it is removed, and :attr:`saved_step` is the previous
        complete step.
        """
        if not self._commit.busy or self.saved_step is None:
            return
        # otherwise the commit waits for their notes until its timeout
        for role, ranks in lost.items():
            self.store.mark_lost(self.saved_step, role, ranks)
        try:
            self.finish()
        except CheckpointError:
            self.saved_step = next(iter(self.store.complete_steps()), None)

    def close(self) -> None:
        """Finish, and release the folder's lock."""
        try:
            self.finish()
        finally:
            self.store.close()
