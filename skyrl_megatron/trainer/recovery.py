"""Recovery of lost ranks, detection of slow ranks, and a saved stop before the host runs out of memory.

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
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from skyrl_megatron.config.hardware import own_memory
from skyrl_megatron.config.roles import is_frozen
from skyrl_megatron.errors import HostMemoryError, RankLostError
from skyrl_megatron.trainer.stopping import StopRequested


class Rewound(Exception):
    """The run went back to an earlier step. The loop continues from there."""


class Recovery:
    """Replaces lost ranks of ``trainer``, a ``RayPPOTrainer``, as its ``trainer.healing`` configures."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.settings = trainer, trainer.cfg.trainer.healing
        self._steps: list[int] = []
        """The step of each recovery of the run."""
        self._reported = 0
        """How many of them :meth:`metrics` has reported."""
        self._complete = False
        """Whether the peer checkpoints of all ranks are of the same step."""
        self._bytes = 0
        self._new: dict[str, set[int]] = {}
        """Role → ranks that were started after the last peer checkpoint and have none."""
        self._start: dict[str, Any] = {}

    # ------------------------------------------------------------------ the parts of a step
    @contextmanager
    def recoverable(self) -> Iterator[Recovery]:
        """Enclose a step whose parts run in :meth:`train` and :meth:`run`. If the run has to rewind, the block ends
        early and the numbers of the step are discarded: the next step is the one after the checkpoint."""
        try:
            yield self
        except Rewound:
            self.trainer.discard_step()

    def train(self, update: Callable[[Any], None], batch: Any) -> None:
        """Run ``update`` on ``batch`` and save peer checkpoints. Recovers as :meth:`run` does. Each attempt gets its
        own copy of the batch, which an update changes."""

        def attempt() -> None:
            update(copy.deepcopy(batch) if self.settings.enabled else batch)
            self.save_peer_checkpoints()

        self.run(attempt)

    def run[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what ``work`` returns. After ranks were lost and replaced, restore the trainer's own state and repeat
        it. Raises the error of ``work`` if no rank was lost or ranks were lost too often, and :class:`Rewound`."""
        if not self.settings.enabled:
            return work(*arguments)
        before = {name: copy.copy(getattr(self.trainer, name)) for name in self.trainer.REPEATED}
        while True:
            try:
                return work(*arguments)
            except StopRequested:
                raise
            except Exception as error:
                self._recover(error)
            for name, value in before.items():
                setattr(self.trainer, name, copy.copy(value))

    # ------------------------------------------------------------------ peer checkpoints
    def begin(self) -> None:
        """Record where the run starts, and save peer checkpoints of that state."""
        if self.settings.enabled:
            trainer = self.trainer
            self._start = {"position": trainer.position, "state": trainer.trainer_state(), "step": trainer.global_step}
            self.save_peer_checkpoints()

    def save_peer_checkpoints(self) -> None:
        """Copy the state of all trained roles. A rank that is lost during this call takes its copies with it."""
        if not self.settings.enabled or self.settings.copies == "none":
            return
        self._complete = False
        with self.trainer.phases("keep_state"):
            self._bytes = 0
            for name in self._trained_roles():
                self.trainer.offload_others(name)
                self._bytes += self.trainer.roles[name].keep_state()
            self.trainer.offload_others("policy")
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
        found = {}
        for name, role in self.trainer.roles.items():
            silent = not isinstance(error, RankLostError) or error.role == role.group.role
            if ranks := role.group.lost(stopped=silent):
                found[name] = ranks
        return found

    def _is_allowed(self) -> bool:
        """Count one more recovery, unless there were too many in the last steps."""
        now = self.trainer.global_step
        recent = [step for step in self._steps if step > now - self.settings.within_steps]
        if len(recent) >= self.settings.max_times:
            self.trainer.tracker.say(
                f"not recovered: {len(recent)} times within {self.settings.within_steps} steps is the limit "
                "(trainer.healing.max_times and within_steps)"
            )
            return False
        self._steps.append(now)
        return True

    def _replace(self, lost: dict[str, list[int]], error: Exception) -> None:
        """Replace the lost ranks, and restore the peer checkpoints of all roles or rewind the run."""
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
                trainer.checkpoints.drop_lost_ranks(parts)
            if "policy" in new:
                trainer.renew_weight_sync()
            holders = {
                name: trainer.roles[name].peer_holders(sorted(new.get(name, ()))) for name in self._trained_roles()
            }
            if self._complete and None not in holders.values():
                for name, of_role in holders.items():
                    trainer.offload_others(name)
                    trainer.roles[name].roll_back(of_role)
                if new.keys() & holders.keys():
                    self.save_peer_checkpoints()
            elif new.keys() & holders.keys() or not isinstance(error, RankLostError):
                self._rewind(who, began, error)
            trainer.offload_others("policy")
        cause = str(error).splitlines()[0] if isinstance(error, RankLostError) else f"{who}: the process ended"
        trainer.tracker.say(f"recovered: {cause}; replaced in {time.monotonic() - began:.1f} s")

    def _rewind(self, who: str, began: float, error: Exception) -> None:
        """Go back to the last checkpoint on disk, or to the start of the run, with all roles. Raises Rewound, or
        ``error`` if the run cannot rewind."""
        trainer = self.trainer
        if not trainer.can_rewind:
            raise error
        if trainer.checkpoints is None or trainer.checkpoints.saved_step is None:
            for name in self._trained_roles():
                if name not in self._new:
                    trainer.roles[name].replace(())
                    trainer.roles[name].rebuild()
        trainer.train_dataloader.load_state_dict(self._start["position"])
        trainer.load_trainer_state(self._start["state"])
        trainer.global_step, trainer.epochs = self._start["step"], trainer.train_dataloader.finished_epochs
        trainer.load_checkpoints()
        trainer.offload_others("policy")
        trainer.sync_weights()
        trainer.before_training()
        self._new = {}
        self.save_peer_checkpoints()
        trainer.tracker.say(
            f"recovered: {who} left no copy of its state on another rank; the run continues after step "
            f"{trainer.global_step}, restarted in {time.monotonic() - began:.1f} s"
        )
        raise Rewound

    def _trained_roles(self) -> Sequence[str]:
        """Return the roles whose state changes during the run."""
        follows = self.trainer.cfg.trainer.update_ref_every_epoch
        return [
            name
            for name, role in self.trainer.roles.items()
            if not is_frozen(role.name) or (name == "ref" and follows)
        ]


RATIO = 2.0
"""How many times the median of the other ranks a slow rank needs."""
STEPS = 3
"""Consecutive steps after which a slow rank is reported."""
SHORTEST_S = 0.02
"""A shorter time of a rank in a step is not reported: others do not wait long for it."""


class Stragglers:
    """Finds the slow ranks of each role: their own time in training exceeds :data:`RATIO` times the median of the
    others in :data:`STEPS` consecutive steps. ``say`` gets one line for each slow rank, and a second one only if the
    rank was fast in between."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._slow: dict[tuple[str, int], int] = {}
        """(role, rank) → consecutive slow steps."""

    def look(self, role: str, seconds: Sequence[float], names: Sequence[str]) -> dict[str, float]:
        """Record the seconds of each rank in a step ([]: unknown) and return ``trainer/<role>_slowest_rank_ratio`` and
        ``trainer/<role>_stragglers``. ``names``: the display name of each rank."""
        if len(seconds) < 2:
            return {}
        ratios = [_ratio(seconds, rank) for rank in range(len(seconds))]
        for rank, ratio in enumerate(ratios):
            slow = ratio > RATIO and seconds[rank] >= SHORTEST_S
            count = self._slow[role, rank] = self._slow.get((role, rank), 0) + 1 if slow else 0
            if count == STEPS:
                self.say(
                    f"straggler: {names[rank]} worked {seconds[rank]:.2g} s in this step, {ratio:.1f} times as long "
                    f"as the others, for {STEPS} steps in a row: check the other load of its host, and its device"
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
    """Return the memory that processes of this host can still allocate without swapping: the smaller of the kernel's
    number and what the container's limit leaves."""
    return min(int(psutil.virtual_memory().available), own_memory() - _used_bytes())


def _used_bytes() -> int:
    """Return the memory that counts against the container's limit, without the inactive page cache."""
    for folder, name, inactive in zip(
        _CGROUPS, ("memory.current", "memory.usage_in_bytes"), ("inactive_file", "total_inactive_file"), strict=True
    ):
        if (folder / name).is_file():
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int((folder / name).read_text()) - int(fields.get(inactive, 0))
    return 0


class MemoryForecast:
    """Predicts from the last steps whether the host runs out of memory. ``available``: returns the free bytes."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self.available = available
        self._seen: deque[int] = deque(maxlen=FORECAST_STEPS)

    def check(self) -> None:
        """Raise HostMemoryError if free memory shrinks from step to step and :data:`AHEAD` more steps would use it
        up. Called once a step."""
        left = self.available()
        self._seen.append(left)
        if len(self._seen) < FORECAST_STEPS:
            return
        seen, half = list(self._seen), FORECAST_STEPS // 2
        growth = (min(seen[:half]) - min(seen[half:])) / half  # minima: memory that is freed again is no growth
        if growth > 0 and left - AHEAD * growth < RESERVE_BYTES:
            raise HostMemoryError(
                f"memory of this host: {left / 2**30:.2f} GiB are left, and each step takes {growth / 2**30:.2f} GiB "
                f"more: the run stops before the kernel kills a process. {_largest()}. Give the host more memory, "
                "sample fewer requests at a time, or find what grows; the same command continues the run"
            )


def _largest() -> str:
    """Name the processes that use most memory."""
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if memory := process.info["memory_info"]:
            found.append((memory.rss, f"{process.info['name']} ({process.info['pid']})"))
    most = ", ".join(f"{name} {nbytes / 2**30:.1f} GiB" for nbytes, name in sorted(found, reverse=True)[:3])
    return f"Largest processes: {most}"
