"""Recovery of lost ranks in the same run (``trainer.healing``; the key and the metric have the name of earlier
versions).

After the optimizer steps of each training step, every rank copies its training state for itself and for a peer
(``runtime/peer_checkpoint.py``). When the process of a rank is lost, all ranks of its role leave their process groups,
a new process replaces the lost one, and all of them build the model again in new groups. They restore the peer
checkpoints, and the interrupted part of the step is repeated: the optimizer steps with the same batch, or what follows
them (checkpoint, export, weight sync) without them. If no rank has the copy of a lost rank, the run rewinds in place
to its last checkpoint on disk.

The loop uses :class:`Recovery` as one context manager::

    with self.recovery.recoverable() as step:
        batch = self.collect_experience()
        step.train(self.update_on, batch)    # repeated after a lost rank, with the same batch
        step.run(self.publish)               # repeated after a lost rank
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.errors import RankLostError
from skyrl_megatron.trainer.stopping import StopRequested

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.checkpoint.checkpointer import Checkpointer
    from skyrl_megatron.sources.run_state import RunState
    from skyrl_megatron.types import TrainingBatch
    from skyrl_megatron.workers.worker_group import WorkerGroup


class Rewound(Exception):
    """The run went back to an earlier step. The loop continues from there."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a run begins, to rewind to it if no checkpoint is complete."""

    step: int
    position: dict[str, Any]
    """The position in the data."""
    trainer_state: dict[str, Any]
    """What a checkpoint would store of the trainer itself."""


class RecoverableRun(Protocol):
    """What recovery needs of the run around the ranks. The trainer is one."""

    checkpoints: Checkpointer | None

    @property
    def can_rewind(self) -> bool:
        """Whether the run can go back to an earlier step in the same process."""

    def run_start(self) -> RunStart:
        """Return where the run is now."""

    def algorithm_state(self) -> dict[str, Any]:
        """Return what the algorithm remembers over the steps."""

    def load_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`algorithm_state` returned."""

    def offload_others(self, name: str) -> None:
        """Offload the roles that share GPUs with ``name``."""

    def renew_weight_sync(self) -> None:
        """Give the weight sync the current ranks of the policy."""

    def rewind(self, start: RunStart) -> None:
        """Load the last checkpoint, or go to the start of the run if there is none, and give the engines its
        weights."""

    def discard_step(self) -> None:
        """Discard the metrics of the current step."""


class Recovery:
    """Replaces lost ranks of ``roles``, and repeats with ``surroundings`` what they were doing.

    ``run``: the state of the run, of which a part that is repeated undoes what it did.
    """

    def __init__(
        self,
        cfg: SkyRLTrainConfig,
        run: RunState,
        roles: Mapping[str, WorkerGroup],
        surroundings: RecoverableRun,
    ) -> None:
        self.settings, self.follows_policy = cfg.trainer.healing, cfg.trainer.update_ref_every_epoch
        self.state, self.roles, self.surroundings = run, roles, surroundings
        self._steps: list[int] = []
        """The step of each recovery of the run."""
        self._reported = 0
        """How many of them :meth:`metrics` has reported."""
        self._complete = False
        """Whether the peer checkpoints of all ranks are of the same step."""
        self._bytes = 0
        self._new: dict[str, set[int]] = {}
        """Role → ranks that were started after the last peer checkpoint and have none."""
        self._start: RunStart | None = None

    # ------------------------------------------------------------------ the parts of a step
    @contextmanager
    def recoverable(self) -> Iterator[Recovery]:
        """Enclose a step whose parts run in :meth:`train` and :meth:`run`. If the run has to rewind, the block ends
        early and the numbers of the step are discarded: the next step is the one after the checkpoint."""
        try:
            yield self
        except Rewound:
            self.surroundings.discard_step()

    def train(self, update: Callable[[TrainingBatch], None], batch: TrainingBatch) -> None:
        """Run ``update`` on ``batch`` and save peer checkpoints. Recovers as :meth:`run` does. Each attempt gets its
        own copy of the batch, which an update changes."""

        def attempt() -> None:
            update(copy.deepcopy(batch) if self.settings.enabled else batch)
            self.save_peer_checkpoints()

        self.run(attempt)

    def run[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what ``work`` returns. After ranks were lost and replaced, undo what it did to the state of the run
        and repeat it. Raises the error of ``work`` if no rank was lost or ranks were lost too often, and
        :class:`Rewound`."""
        if not self.settings.enabled:
            return work(*arguments)
        before, algorithm = self.state.snapshot(), self.surroundings.algorithm_state()
        while True:
            try:
                return work(*arguments)
            except StopRequested:
                raise
            except Exception as error:
                self._recover(error)
            self.state.restore(before)
            self.surroundings.load_algorithm_state(algorithm)

    # ------------------------------------------------------------------ peer checkpoints
    def begin(self) -> None:
        """Record where the run starts, and save peer checkpoints of that state."""
        if self.settings.enabled:
            self._start = self.surroundings.run_start()
            self.save_peer_checkpoints()

    def save_peer_checkpoints(self) -> None:
        """Copy the state of all trained roles. A rank that is lost during this call takes its copies with it."""
        if not self.settings.enabled or self.settings.copies == "none":
            return
        self._complete = False
        with self.state.phases("keep_state"):
            self._bytes = 0
            for name in self._trained_roles():
                self.surroundings.offload_others(name)
                self._bytes += self.roles[name].keep_state()
            self.surroundings.offload_others("policy")
        self._complete, self._new = True, {}

    def metrics(self) -> dict[str, float]:
        """Return the recoveries since the last call, and the size of the peer checkpoints in GB."""
        if not self.settings.enabled:
            return {}
        recoveries, self._reported = len(self._steps) - self._reported, len(self._steps)
        return {"trainer/healings": float(recoveries), "trainer/state_copies_gb": self._bytes / 1e9}

    # ------------------------------------------------------------------ recovery
    def _recover(self, error: Exception) -> None:
        """Replace the ranks whose loss explains ``error``, and those lost while doing so. Raises the error if no rank
        was lost."""
        while True:
            lost = self._lost(error)
            if not lost or not self._is_allowed():
                raise error
            try:
                self._replace(lost, error)
                return
            except Rewound:
                raise
            except Exception as another:
                error = another

    def _lost(self, error: Exception) -> dict[str, list[int]]:
        """Return the lost ranks of each role."""
        lost = {}
        for name, role in self.roles.items():
            # A rank that only hangs, with its process stopped, is lost if nothing else explains the error.
            silent = not isinstance(error, RankLostError) or error.role == role.group.role
            if ranks := role.group.lost(stopped=silent):
                lost[name] = ranks
        return lost

    def _is_allowed(self) -> bool:
        """Count one more recovery, unless there were too many in the last steps."""
        now = self.state.step
        recent = [step for step in self._steps if step > now - self.settings.within_steps]
        if len(recent) >= self.settings.max_times:
            self.state.say(
                f"not recovered: {len(recent)} times within {self.settings.within_steps} steps is the limit "
                "(trainer.healing.max_times and within_steps)"
            )
            return False
        self._steps.append(now)
        return True

    def _replace(self, lost: dict[str, list[int]], error: Exception) -> None:
        """Replace the lost ranks, and restore the peer checkpoints of all roles or rewind the run."""
        around, roles, began = self.surroundings, self.roles, time.monotonic()
        who = "; ".join(f"{roles[name].group.names[rank]}" for name, ranks in lost.items() for rank in ranks)
        with self.state.phases("heal"):
            for name, ranks in lost.items():
                self._new.setdefault(name, set()).update(roles[name].replace(ranks))
            for name in lost:
                roles[name].rebuild()
            new = self._new
            if around.checkpoints is not None:
                parts = {part: new[name] for name in lost for part in roles[name].checkpointed()}
                around.checkpoints.drop_lost_ranks(parts)
            if "policy" in new:
                around.renew_weight_sync()
            holders = {name: roles[name].peer_holders(sorted(new.get(name, ()))) for name in self._trained_roles()}
            if self._complete and None not in holders.values():
                for name, of_role in holders.items():
                    assert of_role is not None
                    around.offload_others(name)
                    roles[name].roll_back(of_role)
                if new.keys() & holders.keys():
                    self.save_peer_checkpoints()
            elif new.keys() & holders.keys() or not isinstance(error, RankLostError):
                self._rewind(who, began, error)
            around.offload_others("policy")
        cause = str(error).splitlines()[0] if isinstance(error, RankLostError) else f"{who}: the process ended"
        self.state.say(f"recovered: {cause}; replaced in {time.monotonic() - began:.1f} s")

    def _rewind(self, who: str, began: float, error: Exception) -> None:
        """Go back to the last checkpoint on disk, or to the start of the run, with all roles. Raises Rewound, or
        ``error`` if the run cannot rewind."""
        around = self.surroundings
        if not around.can_rewind or self._start is None:
            raise error
        if around.checkpoints is None or around.checkpoints.saved_step is None:
            # No checkpoint resets the roles: the others start again from their initial weights as well.
            for name in self._trained_roles():
                if name not in self._new:
                    self.roles[name].replace(())
                    self.roles[name].rebuild()
        around.rewind(self._start)
        self._new = {}
        self.save_peer_checkpoints()
        self.state.say(
            f"recovered: {who} left no copy of its state on another rank; the run continues after step "
            f"{self.state.step}, restarted in {time.monotonic() - began:.1f} s"
        )
        raise Rewound

    def _trained_roles(self) -> Sequence[str]:
        """Return the roles whose state changes during the run."""
        return [
            name
            for name, role in self.roles.items()
            if not is_frozen(role.name) or (name == "ref" and self.follows_policy)
        ]
