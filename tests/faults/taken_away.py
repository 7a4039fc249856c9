"""What keeps the promises of the matrix, taken away: each function disables one guard in its process, for good.

:mod:`tests.faults.guards` names them. They assign to names of the product, which mypy checks. Names that a module has
from another are replaced by :func:`replace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any


def replace(module: Any, name: str, value: Any) -> None:
    """Set a name that the module imports from elsewhere; it has to be there."""
    assert hasattr(module, name), f"{module.__name__} has no {name}: the fault would not be planted"
    setattr(module, name, value)


def last_words() -> None:
    """A run whose end nobody reports."""
    from skyrl_megatron.entrypoints import experiment

    replace(experiment, "crash_reporter", lambda *args: contextlib.nullcontext())


def ray_that_hangs() -> None:
    """A head that is never found to hang."""
    from skyrl_megatron.entrypoints import crash_report

    crash_report._RayHead.poll = lambda self: ""


def deadline() -> None:
    """Calls of ranks wait for ever."""
    from skyrl_megatron.workers.actor_group import ActorGroup

    make = ActorGroup.__init__

    def patient(self: Any, role: Any, actors: Any, timeout_s: float) -> None:
        make(self, role, actors, 1e6)

    ActorGroup.__init__ = patient


def deadline_of_a_start() -> None:
    """The start of a run waits for ever."""
    from skyrl_megatron.trainer import event_loop

    event_loop.with_timeout = lambda work, timeout_s, phase: work


def cause() -> None:
    """Of several ranks that failed, the first by number is named, not the one that caused it."""
    from skyrl_megatron.workers.actor_group import PendingCall

    fail = PendingCall._fail
    PendingCall._fail = lambda self, failures: fail(self, {min(failures): failures[min(failures)]})


def killed_at_the_end() -> None:
    """Ranks are asked to end, not killed."""
    from skyrl_megatron.workers.worker_group import WorkerGroup

    def ask(self: Any) -> None:
        time.sleep(1)
        self.group.call("memory_bytes")

    WorkerGroup.stop = ask


def engines_killed_at_the_end() -> None:
    """Engines are asked to end, not killed."""
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.workers import engines

    async def ask(self: Any) -> None:
        for slot in self.slots:
            while True:
                try:
                    await slot.engine.health()
                    break
                except Exception:  # it has a deadline of its own
                    await asyncio.sleep(1)

    EnginePool.shutdown, engines.STOP_TIMEOUT_S = ask, 1e6


def ray_freed_at_the_end() -> None:
    """The end of Ray is awaited for ever."""
    from skyrl_megatron.workers import ray_setup

    ray_setup.END_TIMEOUT_S = 1e6


def stragglers() -> None:
    """No rank is slow enough to be named."""
    from skyrl_megatron_observe import stragglers as straggler_times

    straggler_times.RATIO = float("inf")


def health() -> None:
    """Engines are not watched."""
    from skyrl_megatron.inference.client import HealthMonitor

    HealthMonitor.start = lambda self: None


def environments_may_fail() -> None:
    """An environment's error is an error of the run."""
    from skyrl_megatron.rollout.episode import Episode

    Episode._in_pool = lambda self, function, *arguments: self.config.pool.run(function, *arguments)


def environments_timeout() -> None:
    """Environments have all the time they want."""
    from skyrl_megatron.envs.env_pool import EnvPool

    make = EnvPool.__init__

    def patient(self: Any, workers: int, timeout_s: float) -> None:
        make(self, workers, timeout_s=1e6)

    EnvPool.__init__ = patient


def stores_errors() -> None:
    """Errors of the store are no errors of a checkpoint."""
    from skyrl_megatron.runtime.checkpoint import manifest, storage, store

    class Other(Exception):
        """An error that nothing expects."""

    for module in (manifest, storage, store):
        replace(module, "CheckpointError", Other)


def hashes() -> None:
    """All tensors have the same hash."""
    from skyrl_megatron_tools import weight_versions

    weight_versions.hash_of = lambda tensor: "the same"


def sums_of_buckets() -> None:
    """Checksums of a weight sync are not compared."""
    from skyrl_megatron.workers import sync_calls, weight_synchronizer

    replace(weight_synchronizer, "compare_buckets", lambda *args: None)
    for module in (weight_synchronizer, sync_calls):
        replace(module, "compare_checksums", lambda *args: None)


def old_checkpoints() -> None:
    """The last checkpoint is removed when the next one begins."""
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

    begin = CheckpointStore.begin

    def at_once(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        self.storage.remove(self.folder(self.pointer()))
        return begin(self, step, *args, **kwargs)

    CheckpointStore.begin = at_once


def disks_errors() -> None:
    """A full disk is an error like any other."""
    from skyrl_megatron.entrypoints import experiment

    experiment.DISK_ERRORS = ()


def lines_left_out() -> None:
    """Every line of the metrics has to be whole."""
    from skyrl_megatron.trainer import tracking

    tracking.read_metrics = lambda path: [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def sums_of_records() -> None:
    """All records of the journal have the same checksum."""
    from skyrl_megatron.data import journal

    class Same:
        """Stands for zlib."""

        @staticmethod
        def crc32(*args: Any) -> int:
            return 0

    replace(journal, "zlib", Same)


def monotonic() -> None:
    """Timeouts follow the clock of the machine."""
    asyncio.BaseEventLoop.time = lambda self: time.time()


def way_back() -> None:
    """Ranks that survive keep what a lost step changed."""
    from skyrl_megatron.workers.worker_group import WorkerGroup

    WorkerGroup.roll_back = lambda self, holders: None


def stopped_are_lost() -> None:
    """Ranks that stand still are not replaced."""
    from skyrl_megatron.workers.actor_group import ActorGroup

    lost = ActorGroup.lost
    ActorGroup.lost = lambda self, *, stopped=True: lost(self, stopped=False)
