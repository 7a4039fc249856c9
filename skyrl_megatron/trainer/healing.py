"""A lost rank is replaced, and what was under way is done again.

The state of all that is trained is copied behind the updates of each step, by each rank for itself and for a neighbour
(``runtime/state_copy.py``). When a process of a role is gone, its role's ranks leave their groups, a new process takes
the lost one's place, and all of them build the model anew, in new groups. They go back to the copies, and the part of
the step that was under way is repeated: the updates with the same batch, or what follows them (saving, export, sync)
without them. Where nobody has the copy of a lost rank, the run goes back to its last checkpoint instead, in place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_megatron.config.rules.role_layout import is_frozen
from skyrl_megatron.errors import RankLostError
from skyrl_megatron.trainer.stop import StopRequested


class Rewound(Exception):
    """The run went back to an earlier step: its loop goes on from there."""


class Healing:
    """Heals the ranks of ``trainer``, a ``RayPPOTrainer``, as its configuration's ``trainer.healing`` says."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.settings = trainer, trainer.cfg.trainer.healing
        self._steps: list[int] = []
        """The step under way at each healing of the run."""
        self._told = 0
        self._whole = False
        self._bytes = 0
        self._new: dict[str, set[int]] = {}
        """Ranks of each role that were started since copies were made, and have none."""
        self._start: dict[str, Any] = {}

    # ------------------------------------------------------------------ copies
    def begin(self) -> None:
        """Note where the run begins, and copy the state that it begins with."""
        if self.settings.enabled:
            trainer = self.trainer
            self._start = {"position": trainer.position, "state": trainer.trainer_state(), "step": trainer.global_step}
            self.keep()

    def keep(self) -> None:
        """Copy the state of all that is trained. A rank that is lost meanwhile takes the copies with it."""
        if not self.settings.enabled or self.settings.copies == "none":
            return
        self._whole = False
        with self.trainer.phases("keep_state"):
            roles = self._kept()
            self._bytes = 0
            for name in roles:
                self.trainer.leave_to(name)
                self._bytes += self.trainer.roles[name].keep_state()
            self.trainer.leave_to("policy")
        self._whole, self._new = True, {}

    def fresh(self, batch: Any) -> Any:
        """Return what an update may change of ``batch``, which it may have to begin with again."""
        return copy.deepcopy(batch) if self.settings.enabled else batch

    # ------------------------------------------------------------------ what is repeated
    def repeated[T](self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; it is repeated, with the trainer's own state as it was, where ranks were lost
        on the way. Raises its error where none was, or too often, and :class:`Rewound`."""
        if not self.settings.enabled:
            return work()
        before = self._state()
        while True:
            try:
                return work()
            except StopRequested:
                raise
            except Exception as error:
                self._recover(error)
            for name, value in before.items():
                setattr(self.trainer, name, copy.copy(value))

    def metrics(self) -> dict[str, float]:
        """Return what was healed since this was asked last, and what copies hold."""
        if not self.settings.enabled:
            return {}
        healed, self._told = len(self._steps) - self._told, len(self._steps)
        return {"trainer/healings": float(healed), "trainer/state_copies_gb": self._bytes / 1e9}

    def _state(self) -> dict[str, Any]:
        return {name: copy.copy(getattr(self.trainer, name)) for name in self.trainer.REPEATED}

    def _recover(self, error: Exception) -> None:
        """Heal what explains ``error``, and what is lost while that is done. Raises it where nothing is."""
        while True:
            lost = self._lost(error)
            if not lost or not self._once_more():
                raise error
            try:
                self._heal(lost, error)
                return
            except Rewound:
                raise
            except Exception as another:
                error = another

    def _lost(self, error: Exception) -> dict[str, list[int]]:
        """Return the lost ranks of each role."""
        found = {}
        for name, role in self.trainer.roles.items():
            silent = not isinstance(error, RankLostError) or error.role == role.group.role
            if ranks := role.group.lost(stopped=silent):
                found[name] = ranks
        return found

    def _once_more(self) -> bool:
        """Count one more healing, unless there were too many lately."""
        now = self.trainer.global_step
        recent = [step for step in self._steps if step > now - self.settings.within_steps]
        if len(recent) >= self.settings.max_times:
            self.trainer.tracker.say(
                f"not healed: {len(recent)} times within {self.settings.within_steps} steps is all that "
                "trainer.healing allows"
            )
            return False
        self._steps.append(now)
        return True

    # ------------------------------------------------------------------ healing
    def _heal(self, lost: dict[str, list[int]], error: Exception) -> None:
        """Replace the ranks, and bring all roles back to where the copies are of, or the run to its checkpoint."""
        trainer, began = self.trainer, time.monotonic()
        who = "; ".join(f"{trainer.roles[name].group.names[rank]}" for name, ranks in lost.items() for rank in ranks)
        with trainer.phases("heal"):
            for name, ranks in lost.items():
                self._new.setdefault(name, set()).update(trainer.roles[name].replace(ranks))
            for name in lost:
                trainer.roles[name].rebuild()
            new = self._new
            if trainer.checkpoints is not None:
                parts = {part: new[name] for name in lost for part in trainer.roles[name].checkpointed()}
                trainer.checkpoints.give_up(parts)
            if "policy" in new:
                trainer.renew_weight_sync()
            kept = {name: trainer.roles[name].kept_by(sorted(new.get(name, ()))) for name in self._kept()}
            if self._whole and None not in kept.values():
                for name, holders in kept.items():
                    trainer.leave_to(name)
                    trainer.roles[name].roll_back(holders)
                if new.keys() & kept.keys():
                    self.keep()
            elif new.keys() & kept.keys() or not isinstance(error, RankLostError):
                self._rewind(who, began, error)
            trainer.leave_to("policy")
        said = str(error).splitlines()[0] if isinstance(error, RankLostError) else f"{who}: the process is gone"
        trainer.tracker.say(f"healed: {said}; started again in {time.monotonic() - began:.1f} s")

    def _rewind(self, who: str, began: float, error: Exception) -> None:
        """Go back to the last checkpoint, or to where the run began, with all roles. Raises Rewound, or ``error``
        where the run cannot."""
        trainer = self.trainer
        if not trainer.can_rewind:
            raise error
        if trainer.checkpoints is None or trainer.checkpoints.saved_step is None:
            for name in self._kept():
                if name not in self._new:
                    trainer.roles[name].replace(())
                    trainer.roles[name].rebuild()
        trainer.train_dataloader.load_state_dict(self._start["position"])
        trainer.load_trainer_state(self._start["state"])
        trainer.global_step, trainer.epochs = self._start["step"], trainer.train_dataloader.finished_epochs
        trainer.load_checkpoints()
        trainer.leave_to("policy")
        trainer.sync_weights()
        trainer.before_training()
        self._new = {}
        self.keep()
        trainer.tracker.say(
            f"healed: {who} left no copy of its state; all goes on behind step {trainer.global_step}, begun again in "
            f"{time.monotonic() - began:.1f} s"
        )
        raise Rewound

    def _kept(self) -> Sequence[str]:
        """Return the roles whose state is not that of a folder."""
        follows = self.trainer.cfg.trainer.update_ref_every_epoch
        return [
            name
            for name, role in self.trainer.roles.items()
            if not is_frozen(role.name) or (name == "ref" and follows)
        ]
