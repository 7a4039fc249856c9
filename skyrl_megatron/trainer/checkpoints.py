"""Checkpoints of a whole run: every role's ranks, the position in the data, and the trainer's own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint.background import Background
from skyrl_megatron.runtime.checkpoint.resume import choose
from skyrl_megatron.runtime.checkpoint.store import DATA, TRAINER_STATE, Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.workers.worker_group import WorkerGroup


class RunCheckpoints:
    """Saves and restores the trained ``roles`` together. Ranks write their shares; this process completes the folder.

    With ``megatron_config.async_dist_ckpt_save`` a save returns once all ranks have copied their state.
    """

    def __init__(self, cfg: SkyRLTrainConfig, roles: Mapping[str, WorkerGroup]) -> None:
        self.cfg, self.roles = cfg, dict(roles)
        self.store = CheckpointStore(cfg.trainer.ckpt_path, keep=cfg.trainer.max_ckpts_to_keep)
        self.asynchronous = cfg.trainer.policy.megatron_config.async_dist_ckpt_save
        self.saved_step: int | None = None
        self._commit = Background("an asynchronous save")

    def save(self, step: int, data: Mapping[str, Any], state: Mapping[str, Any], *, finite: bool = True) -> str | None:
        """Save step ``step``; the folder that it will be, or None after a step that was not ``finite``.

        Raises CheckpointError when it cannot be written; of an asynchronous save, the next call tells.
        """
        self.finish()
        sizes = {name: len(role.group) for name, role in self.roles.items()}
        folder = self.store.begin(step, sizes, last_step_finite=finite)
        if folder is None:
            return None
        try:
            for role in self.roles.values():
                role.save_checkpoint(folder, step, background=self.asynchronous)
        except BaseException:
            self.store.discard(step)
            raise
        position, progress = dict(data), dict(state)

        def commit() -> None:
            timeout = self.cfg.trainer.phase_timeout_s
            self.store.commit(step, sizes, data=position, trainer_state=progress, timeout_s=timeout)

        if self.asynchronous:
            self._commit.start(commit)
        else:
            commit()
        self.saved_step = step
        return folder

    def load(self) -> tuple[Checkpoint, dict[str, Any], dict[str, Any]] | None:
        """Restore what ``trainer.resume_mode`` asks for: (checkpoint, data position, trainer state); None: start anew.

        One that proves damaged while it is read is passed with a warning, and the one before is taken. Raises
        CheckpointError when none of those that are there can be loaded.
        """
        candidates = choose(self.store, self.cfg.trainer.resume_mode, self.cfg.trainer.resume_path)
        for found in candidates:
            try:
                for role in self.roles.values():
                    role.load_checkpoint(found.folder)
                data, state = (self.store.read_json(found, name) for name in (DATA, TRAINER_STATE))
            except CheckpointError as error:
                candidates.reject(str(error))
                continue
            self.saved_step = found.step
            return found, data, state
        return None

    def finish(self) -> None:
        """Until no save is under way. Raises CheckpointError when the last one failed."""
        if self.asynchronous:
            for role in self.roles.values():
                role.wait_checkpoint()
        self._commit.wait(self.cfg.trainer.phase_timeout_s)

    def close(self) -> None:
        """Give the folder back to other runs."""
        self.store.close()
