"""What keeps the promises of the matrix, each as Python that takes it away: the promise is then not kept, so that it
is this that keeps it, and a test that would see if it were gone (``test_planted.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.words import BYTES, DEATHS, ENGINES, RANKS, RAY, Cell

type Words = tuple[str, ...]


@dataclass(frozen=True)
class Guard:
    """``without``: run in the driver of a life that meets the fault of ``cell``, or where ``test`` is run. ``fails``:
    what is then found to be wrong, a regular expression."""

    name: str
    cell: Cell
    without: str
    fails: str
    test: str = ""
    """Which proof of the cell notices; "": a whole run (``ways.py``)."""
    healing: bool = False
    when: str = ""
    """Where it matters most, if not anywhere in the phase: a name of ``injection.arm``."""


@dataclass(frozen=True)
class Unguarded:
    """Promises that nothing in this project guards, and what keeps them."""

    why: str
    who: Words
    what: Words
    when: Words = ()


LAST_WORDS = """
import contextlib
from skyrl_megatron.entrypoints import experiment
experiment.crash_reporter = lambda *args: contextlib.nullcontext()
"""
RAY_THAT_HANGS = """
from skyrl_megatron.entrypoints import crash_report
crash_report._RayHead.poll = lambda self: ""
"""
DEADLINE = """
from skyrl_megatron.workers.actor_group import ActorGroup
make = ActorGroup.__init__
ActorGroup.__init__ = lambda self, role, actors, timeout_s: make(self, role, actors, 1e6)
"""
DEADLINE_OF_A_START = """
from skyrl_megatron.trainer import event_loop as loop_thread
loop_thread.with_timeout = lambda work, timeout_s, phase: work
"""
CAUSE = """
from skyrl_megatron.workers.actor_group import PendingCall
fail = PendingCall._fail
PendingCall._fail = lambda self, failures: fail(self, {min(failures): failures[min(failures)]})
"""
KILLED_AT_THE_END = """
import time
from skyrl_megatron.workers.worker_group import WorkerGroup
def ask(self):
    time.sleep(1)
    self.group.call("memory_bytes")
WorkerGroup.stop = ask
"""
ENGINES_KILLED_AT_THE_END = """
import asyncio
from skyrl_megatron.inference.engine_pool import EnginePool
from skyrl_megatron.workers import engines as inference_engine_client
async def ask(self):
    for slot in self.slots:
        while True:
            try:
                await slot.engine.health()
                break
            except Exception:  # it has a deadline of its own
                await asyncio.sleep(1)
EnginePool.shutdown, inference_engine_client.STOP_TIMEOUT_S = ask, 1e6
"""
"""Both are asked to end, in place of being killed."""
RAY_FREED_AT_THE_END = """
from skyrl_megatron.workers import ray_setup
ray_setup.END_TIMEOUT_S = 1e6
"""
STRAGGLERS = """
from skyrl_megatron.trainer import stragglers
stragglers.RATIO = float("inf")
"""
HEALTH = """
from skyrl_megatron.inference.client import HealthMonitor
HealthMonitor.start = lambda self: None
"""
ENVIRONMENTS_MAY_FAIL = """
from skyrl_megatron.rollout.episode import Episode
Episode._in_pool = lambda self, function, *arguments: self.config.pool.run(function, *arguments)
"""
ENVIRONMENTS_TIMEOUT = """
from skyrl_megatron.envs.env_pool import EnvPool
make = EnvPool.__init__
EnvPool.__init__ = lambda self, workers, timeout_s: make(self, workers, timeout_s=1e6)
"""
STORES_ERRORS = """
from skyrl_megatron.runtime.checkpoint import manifest, storage, store
for module in (manifest, storage, store):
    module.CheckpointError = type("Other", (Exception,), {})
"""
HASHES = """
from skyrl_megatron_tools import weight_versions as versions
versions.hash_of = lambda tensor: "the same"
"""
SUMS_OF_BUCKETS = """
from skyrl_megatron.workers import sync_calls, weight_synchronizer
weight_synchronizer.compare_buckets = weight_synchronizer.compare_checksums = lambda *args: None
sync_calls.compare_checksums = weight_synchronizer.compare_checksums
"""
OLD_CHECKPOINTS = """
from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
begin = CheckpointStore.begin
def at_once(self, step, *args, **kwargs):
    self.storage.remove(self.folder(self.pointer()))
    return begin(self, step, *args, **kwargs)
CheckpointStore.begin = at_once
"""
DISKS_ERRORS = """
from skyrl_megatron.entrypoints import experiment
experiment.DISK_ERRORS = ()
"""
LINES_LEFT_OUT = """
import json
from pathlib import Path
from skyrl_megatron.trainer import tracking
tracking.read_metrics = lambda path: [json.loads(line) for line in Path(path).read_bytes().splitlines()]
"""
SUMS_OF_RECORDS = """
from skyrl_megatron.data import journal as segment
segment.zlib = type("Same", (), {"crc32": lambda *args: 0})
"""
MONOTONIC = """
import asyncio, time
asyncio.BaseEventLoop.time = lambda self: time.time()
"""
WAY_BACK = """
from skyrl_megatron.workers.worker_group import WorkerGroup
WorkerGroup.roll_back = lambda self, holders: None
"""
STOPPED_ARE_LOST = """
from skyrl_megatron.workers.actor_group import ActorGroup
lost = ActorGroup.lost
ActorGroup.lost = lambda self, *, stopped=True: lost(self, stopped=False)
"""

RANK = RANKS[3]
LATE = "the run did not end|trainer.phase_timeout_s"
"""By a deadline of another part, if at all: the collectives of ranks have one too."""
GUARDS = (
    Guard("last words, driver", ("driver", "SIGKILL", "train"), LAST_WORDS, "the run's process"),
    Guard("last words, head", ("Ray head", "SIGKILL", "train"), LAST_WORDS, "Ray's head"),
    Guard("last words, node", ("Ray node", "SIGKILL", "sample"), LAST_WORDS, "Ray's node"),
    Guard("deadline of ranks", (RANK, "SIGSTOP", "train"), DEADLINE, LATE),
    Guard("Ray that hangs", ("Ray node", "SIGSTOP", "train"), RAY_THAT_HANGS, "the run did not end"),
    Guard("deadline of a start", ("engine core", "SIGSTOP", "start"), DEADLINE_OF_A_START, "the run did not end"),
    Guard("cause, in a call", (RANK, "SIGKILL", "train"), CAUSE, "policy rank 1"),
    Guard("cause, before a call", (RANK, "SIGKILL", "sample"), CAUSE, "policy rank 1"),
    Guard("ranks killed at the end", (RANK, "SIGSTOP", "shutdown"), KILLED_AT_THE_END, "it did not go on|left behind"),
    Guard("engines killed at the end", ("engine core", "SIGSTOP", "shutdown"), ENGINES_KILLED_AT_THE_END, "not end"),
    Guard("Ray freed at the end", ("Ray node", "SIGSTOP", "shutdown"), RAY_FREED_AT_THE_END, "the run did not end"),
    Guard(
        "stragglers",
        (RANK, "slow ×10", "train"),
        STRAGGLERS,
        "AssertionError",
        "tests/trainer/test_stragglers.py::test_a_slow_rank_is_named_once_until_it_was_fast_again",
    ),
    Guard("health", ("engine core", "SIGKILL", "sample"), HEALTH, "it did not go on"),
    Guard("health, stopped", ("engine worker", "SIGSTOP", "sample"), HEALTH, "it did not go on"),
    Guard("environments may fail", ("environment", "exception", "sample"), ENVIRONMENTS_MAY_FAIL, "it did not go on"),
    Guard(
        "environments' timeout",
        ("environment", "slow ×10", "sample"),
        ENVIRONMENTS_TIMEOUT,
        "Timeout",
        "tests/envs/test_registry.py::test_pool_gives_up_on_calls_that_hang",
    ),
    Guard("store's errors, save", ("object store", "exception", "save"), STORES_ERRORS, "Traceback"),
    Guard("store's errors", ("object store", "exception", "start"), STORES_ERRORS, "Traceback"),
    Guard(
        "hashes",
        ("object store", BYTES[0], "start"),
        HASHES,
        "DID NOT RAISE",
        "tests/tools/test_weight_versions.py::test_damage_is_named_and_never_served",
    ),
    Guard(
        "sums of buckets",
        ("network link", "byte in bucket", "sync"),
        SUMS_OF_BUCKETS,
        "DID NOT RAISE|Regex pattern did not match",
        "tests/weight_sync/test_sync.py::test_a_faulty_update_is_never_served",
    ),
    Guard("old checkpoints", ("disk", "full disk", "save"), OLD_CHECKPOINTS, "MANIFEST.json|global_step"),
    Guard("disks' errors", ("disk", "full disk", "sample"), DISKS_ERRORS, "Traceback"),
    Guard(
        "lines left out",
        ("disk", "byte in metrics", "start"),
        LINES_LEFT_OUT,
        "Error",
        "tests/job/test_tracking.py::test_a_damaged_line_is_left_out_and_costs_no_other",
    ),
    Guard(
        "sums of records",
        ("disk", "byte in segment", "start"),
        SUMS_OF_RECORDS,
        "DID NOT RAISE",
        "tests/trainer/test_journal.py::test_any_flipped_bit_is_named",
    ),
    Guard("monotonic", ("clock", "jump", "sample"), MONOTONIC, "it did not go on"),
    # behind a step's first update the survivor has taken it, and takes it again
    Guard("way back", (RANK, "SIGKILL", "train"), WAY_BACK, "other numbers", healing=True, when="between updates"),
    Guard("way back, sync", (RANK, "SIGKILL", "sync"), WAY_BACK, "other numbers", healing=True),
    Guard("way back, sample", (RANK, "SIGKILL", "sample"), WAY_BACK, "other numbers", healing=True),
    Guard("stopped are lost", (RANK, "SIGSTOP", "train"), STOPPED_ARE_LOST, "did not (go on|end)", healing=True),
)

UNGUARDED = (
    Unguarded("Python ends the run, and Ray what it started", ("driver",), ("exception",)),
    Unguarded("nobody waits for the driver with a deadline", ("driver",), ("SIGSTOP", "slow ×10")),
    Unguarded(
        "vLLM notices what dies or fails at its start", ENGINES, (*DEATHS, "exception", "out of memory"), ("start",)
    ),
    Unguarded("deadlines are longer than what is slow takes", (*ENGINES, *RAY, "network link"), ("slow ×10",)),
    Unguarded("a disk or a store that is slow is waited for", ("disk", "object store"), ("slow ×10",)),
    Unguarded("the server answers a request whose handler failed", ("registry",), ("exception", "slow ×10")),
    Unguarded("the store's client gives up", ("object store",), ("cut link",)),
    Unguarded("Ray and collectives give up connections that are cut", ("network link",), ("cut link",)),
)
