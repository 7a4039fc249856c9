"""Saving and resuming where all ranks are in one process group and rank 0 keeps the folder (no Ray).

Under Ray the same steps are called apart: the trainer's process has the :class:`CheckpointStore`, the workers call
``RankWriter.write`` and ``read_rank``.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.background import Background
from skyrl_megatron.runtime.checkpoint.rank_reader import agree, read_rank
from skyrl_megatron.runtime.checkpoint.rank_writer import RankState, RankWriter
from skyrl_megatron.runtime.checkpoint.resume import Candidates, choose
from skyrl_megatron.runtime.checkpoint.store import DATA, TRAINER_STATE, Checkpoint, CheckpointStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run continues from. The model, optimizer, schedule and random states have been filled."""

    step: int
    folder: str
    data: dict[str, Any]
    trainer_state: dict[str, Any]


class Checkpointer:
    """Saves and resumes one role. Every method is called on all ranks, in the same order.

    ``asynchronous``: :meth:`save` returns once each rank has copied its own state; the rest happens behind the
    training. ``when_busy``: what a save does that comes before the last one is done: wait for it, or skip.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        role: str = "policy",
        keep: int = -1,
        asynchronous: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        timeout_s: float = 1800.0,
    ) -> None:
        self.store = CheckpointStore(root, keep=keep)
        self.writer = RankWriter()
        self._role = role
        self._asynchronous, self._skip_when_busy, self._timeout_s = asynchronous, when_busy == "skip", timeout_s
        self._commit = Background("an asynchronous save")

    def save(
        self,
        step: int,
        state: RankState,
        *,
        data: Mapping[str, Any] | None = None,
        trainer_state: Mapping[str, Any] | None = None,
        last_step_finite: bool = True,
    ) -> bool:
        """Save ``state`` as checkpoint ``step``; False when there is none to make (busy, or a step not finite).

        ``data`` and ``trainer_state`` are plain JSON values and are taken as they are now. Raises CheckpointError on
        every rank when a rank cannot write; of an asynchronous save, the next call or :meth:`finish` tells.
        """
        if self._skip_when_busy and agree(lambda: self._commit.busy)[0]:
            logger.warning("step %d is not saved: the save before it is still being written", step)
            return False
        roles = {self._role: dist.get_world_size()}

        def prepare() -> tuple[str | None, list[dict[str, Any]]]:
            self._settle()
            extras = _snapshot(data, trainer_state)
            folder = self.store.begin(step, roles, last_step_finite=last_step_finite) if dist.get_rank() == 0 else None
            return folder, extras

        folder, (position, progress) = agree(prepare)[0]
        if folder is None:
            return False
        try:
            agree(lambda: self.writer.write(folder, self._role, step, state, background=self._asynchronous))
        except CheckpointError:
            self._on_first(lambda: self.store.discard(step))
            raise

        def commit() -> None:
            self.store.commit(step, roles, data=position, trainer_state=progress, timeout_s=self._timeout_s)

        if not self._asynchronous:
            self._on_first(commit)
        elif dist.get_rank() == 0:
            self._commit.start(commit)
        return True

    def finish(self) -> None:
        """Until no save is under way. Raises CheckpointError on every rank when the last one failed."""
        agree(self._settle)

    def _settle(self) -> None:
        """Wait for this rank's background work, all of it, then tell of the first failure."""
        try:
            self.writer.wait(self._timeout_s)
        finally:
            self._commit.wait(self._timeout_s)

    def resume(self, mode: str | None, path: str | None, state: RankState, *, seed: int) -> Resumed | None:
        """Fill ``state`` from the checkpoint that ``mode`` and ``path`` name (``trainer.resume_mode``, ``_path``).

        None when there is nothing to resume. With ``latest``, one that proves damaged while it is read is passed
        with a warning and the one before is read over it. Raises CheckpointError when checkpoints exist and none
        can be loaded, and for ``from_path`` with one that cannot.
        """
        self.finish()
        candidates: Candidates | None = None

        def take(rejected: str | None) -> Checkpoint | None:
            nonlocal candidates
            candidates = candidates or choose(self.store, mode, path)
            if rejected is not None:
                candidates.reject(rejected)
            return next(candidates, None)

        failure: str | None = None
        while (found := self._on_first(functools.partial(take, failure))) is not None:
            try:
                return self._load(found, state, seed)
            except CheckpointError as error:
                failure = str(error)
        return None

    def _load(self, found: Checkpoint, state: RankState, seed: int) -> Resumed:
        step = read_rank(found.folder, self._role, state, seed=seed)
        contents = [self.store.read_json(found, name) for name in (DATA, TRAINER_STATE)]
        return Resumed(step, found.folder, *contents)

    def close(self) -> None:
        """Finish, and give the folder's lock back."""
        try:
            self.finish()
        finally:
            self.store.close()

    def _on_first[T](self, work: Callable[[], T]) -> T:
        """The result of ``work()``, run on rank 0 only; its failure is every rank's."""
        return cast(T, agree(lambda: work() if dist.get_rank() == 0 else None)[0])


def _snapshot(*values: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Copies that later changes do not reach. Raises CheckpointError for what JSON cannot hold."""
    try:
        return [json.loads(json.dumps(dict(value or {}), allow_nan=False)) for value in values]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the data position and trainer state must be plain JSON values: {error}") from error
