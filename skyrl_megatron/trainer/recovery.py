"""Recovery of lost ranks, detection of slow ranks, and a saved end before host memory runs out.

The state of all that is trained is copied behind the updates of each step, by each rank for itself and for a neighbour
(``runtime/state_copy.py``). When a process of a role is gone, its role's ranks leave their groups, a new process takes
the lost one's place, and all of them build the model anew, in new groups. They go back to the copies, and the part of
the step that was under way is repeated: the updates with the same batch, or what follows them (saving, export, sync)
without them. Where nobody has the copy of a lost rank, the run goes back to its last checkpoint instead, in place.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron.config.hardware import own_memory
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.errors import MemoryAheadError, RankLostError
from skyrl_megatron.trainer.stopping import StopRequested


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


RATIO = 2.0
STEPS = 3
SHORTEST_S = 0.02
"""A rank's own time in a step, below which nobody waits long for it."""


class Stragglers:
    """Of every role the ranks whose own time in training is more than :data:`RATIO` times the median of the others',
    in :data:`STEPS` steps that follow one another. ``say`` gets one line for each, and no second one while it stays
    slow."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._slow: dict[tuple[str, int], int] = {}
        """(role, rank) → steps that it has been slow for."""

    def look(self, role: str, seconds: Sequence[float], names: Sequence[str]) -> dict[str, float]:
        """Take a step's own seconds by rank ([]: not known), and return ``trainer/<role>_slowest_rank_ratio`` and
        ``trainer/<role>_stragglers``. ``names``: how each rank is called."""
        if len(seconds) < 2:
            return {}
        ratios = [_ratio(seconds, rank) for rank in range(len(seconds))]
        for rank, ratio in enumerate(ratios):
            slow = ratio > RATIO and seconds[rank] >= SHORTEST_S
            count = self._slow[role, rank] = self._slow.get((role, rank), 0) + 1 if slow else 0
            if count == STEPS:
                self.say(
                    f"straggler: {names[rank]} worked {seconds[rank]:.2g} s in this step, {ratio:.1f} times as long "
                    f"as the others, and so for {STEPS} steps: look at what else its host does, and at its device"
                )
        found = sum(self._slow[role, rank] >= STEPS for rank in range(len(seconds)))
        return {f"trainer/{role}_slowest_rank_ratio": max(ratios), f"trainer/{role}_stragglers": float(found)}


def _ratio(seconds: Sequence[float], rank: int) -> float:
    others = statistics.median([each for number, each in enumerate(seconds) if number != rank])
    return seconds[rank] / max(others, 1e-9)


FORECAST_STEPS = 8
"""Steps over which growth is measured."""
AHEAD = 2
"""Further steps that must fit."""
RESERVE_BYTES = 256 << 20
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


def available_bytes() -> int:
    """Return what processes here can still take without swapping, by the kernel and by the limit of the container."""
    return min(int(psutil.virtual_memory().available), own_memory() - _used_bytes())


def _used_bytes() -> int:
    """Return what counts against the container's limit, without the part of files that is dropped first."""
    for folder, name, inactive in zip(
        _CGROUPS, ("memory.current", "memory.usage_in_bytes"), ("inactive_file", "total_inactive_file"), strict=True
    ):
        if (folder / name).is_file():
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int((folder / name).read_text()) - int(fields.get(inactive, 0))
    return 0


class MemoryAhead:
    """Looks once a step. ``available``: where the number comes from."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self.available = available
        self._seen: deque[int] = deque(maxlen=FORECAST_STEPS)

    def look(self) -> None:
        """Raise MemoryAheadError when memory shrinks from step to step and :data:`AHEAD` more would use it up."""
        left = self.available()
        self._seen.append(left)
        if len(self._seen) < FORECAST_STEPS:
            return
        seen, half = list(self._seen), FORECAST_STEPS // 2
        grows = (min(seen[:half]) - min(seen[half:])) / half  # lows: what comes and goes again is no growth
        if grows > 0 and left - AHEAD * grows < RESERVE_BYTES:
            raise MemoryAheadError(
                f"memory of this host: {left / 2**30:.2f} GiB are left, and each step takes {grows / 2**30:.2f} GiB "
                f"more, so that the kernel would soon end a process: the run ends here. {_largest()}. Give it more "
                "memory, fewer samples in flight, or find what grows; the same command continues"
            )


def _largest() -> str:
    """Name the processes that hold most."""
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if memory := process.info["memory_info"]:
            found.append((memory.rss, f"{process.info['name']} ({process.info['pid']})"))
    most = ", ".join(f"{name} {nbytes / 2**30:.1f} GiB" for nbytes, name in sorted(found, reverse=True)[:3])
    return f"Largest processes: {most}"
