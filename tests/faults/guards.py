"""What keeps the promises of the matrix, and what takes it away: without its guard a promise is broken, and a test
notices (``test_planted.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import taken_away
from tests.faults.words import BYTES, DEATHS, ENGINES, RANKS, RAY, Cell

type Words = tuple[str, ...]


@dataclass(frozen=True)
class Guard:
    """``without``: a function of :mod:`.taken_away`, called in the driver of a life that meets the fault of ``cell``,
    or where ``test`` is run. ``fails``: what is then wrong, a regular expression."""

    name: str
    cell: Cell
    without: Callable[[], None]
    fails: str
    test: str = ""
    """Which proof of the cell notices; "": a whole run (``ways.py``)."""
    healing: bool = False
    when: str = ""
    """Where it matters most, if not anywhere in the phase: a name of ``injection.arm``."""

    @property
    def planted(self) -> str:
        """The line that takes the guard away in another process."""
        return f"from tests.faults import taken_away; taken_away.{self.without.__name__}()"


@dataclass(frozen=True)
class Unguarded:
    """Promises that nothing in this project guards, and what keeps them."""

    why: str
    who: Words
    what: Words
    when: Words = ()


RANK = RANKS[3]
LATE = "the run did not end|trainer.phase_timeout_s"
"""By a deadline of another part, if at all: the collectives of ranks have one too."""
GUARDS = (
    Guard("last words, driver", ("driver", "SIGKILL", "train"), taken_away.last_words, "the run's process"),
    Guard("last words, head", ("Ray head", "SIGKILL", "train"), taken_away.last_words, "Ray's head"),
    Guard("last words, node", ("Ray node", "SIGKILL", "sample"), taken_away.last_words, "Ray's node"),
    Guard("deadline of ranks", (RANK, "SIGSTOP", "train"), taken_away.deadline, LATE),
    Guard("Ray that hangs", ("Ray node", "SIGSTOP", "train"), taken_away.ray_that_hangs, "the run did not end"),
    Guard(
        "deadline of a start",
        ("engine core", "SIGSTOP", "start"),
        taken_away.deadline_of_a_start,
        "the run did not end",
    ),
    Guard("cause, in a call", (RANK, "SIGKILL", "train"), taken_away.cause, "policy rank 1"),
    Guard("cause, before a call", (RANK, "SIGKILL", "sample"), taken_away.cause, "policy rank 1"),
    Guard(
        "ranks killed at the end",
        (RANK, "SIGSTOP", "shutdown"),
        taken_away.killed_at_the_end,
        "it did not continue|left over",
    ),
    Guard(
        "engines killed at the end",
        ("engine core", "SIGSTOP", "shutdown"),
        taken_away.engines_killed_at_the_end,
        "not end",
    ),
    Guard(
        "Ray freed at the end",
        ("Ray node", "SIGSTOP", "shutdown"),
        taken_away.ray_freed_at_the_end,
        "the run did not end",
    ),
    Guard(
        "stragglers",
        (RANK, "slow ×10", "train"),
        taken_away.stragglers,
        "AssertionError",
        "tests/observe/test_stragglers.py::test_a_slow_rank_is_named_once_until_it_was_fast_again",
    ),
    Guard("health", ("engine core", "SIGKILL", "sample"), taken_away.health, "it did not continue"),
    Guard("health, stopped", ("engine worker", "SIGSTOP", "sample"), taken_away.health, "it did not continue"),
    Guard(
        "environments may fail",
        ("environment", "exception", "sample"),
        taken_away.environments_may_fail,
        "it did not continue",
    ),
    Guard(
        "environments' timeout",
        ("environment", "slow ×10", "sample"),
        taken_away.environments_timeout,
        "Timeout",
        "tests/envs/test_registry.py::test_pool_gives_up_on_calls_that_hang",
    ),
    Guard("store's errors, save", ("object store", "exception", "save"), taken_away.stores_errors, "Traceback"),
    Guard("store's errors", ("object store", "exception", "start"), taken_away.stores_errors, "Traceback"),
    Guard(
        "hashes",
        ("object store", BYTES[0], "start"),
        taken_away.hashes,
        "DID NOT RAISE",
        "tests/tools/test_weight_versions.py::test_damage_is_named_and_never_served",
    ),
    Guard(
        "sums of buckets",
        ("network link", "byte in bucket", "sync"),
        taken_away.sums_of_buckets,
        "DID NOT RAISE|Regex pattern did not match",
        "tests/weight_sync/test_sync.py::test_a_faulty_update_is_never_served",
    ),
    Guard("old checkpoints", ("disk", "full disk", "save"), taken_away.old_checkpoints, "MANIFEST.json|global_step"),
    Guard("disks' errors", ("disk", "full disk", "sample"), taken_away.disks_errors, "Traceback"),
    Guard(
        "lines left out",
        ("disk", "byte in metrics", "start"),
        taken_away.lines_left_out,
        "Error",
        "tests/observe/test_tracking.py::test_a_damaged_line_is_left_out_and_costs_no_other",
    ),
    Guard(
        "sums of records",
        ("disk", "byte in segment", "start"),
        taken_away.sums_of_records,
        "DID NOT RAISE",
        "tests/trainer/test_journal.py::test_any_flipped_bit_is_named",
    ),
    Guard("monotonic", ("clock", "jump", "sample"), taken_away.monotonic, "it did not continue"),
    # after a step's first update the survivor has taken it, and takes it again
    Guard(
        "way back",
        (RANK, "SIGKILL", "train"),
        taken_away.way_back,
        "other numbers",
        healing=True,
        when="between updates",
    ),
    Guard("way back, sync", (RANK, "SIGKILL", "sync"), taken_away.way_back, "other numbers", healing=True),
    Guard("way back, sample", (RANK, "SIGKILL", "sample"), taken_away.way_back, "other numbers", healing=True),
    Guard(
        "stopped are lost",
        (RANK, "SIGSTOP", "train"),
        taken_away.stopped_are_lost,
        "did not (continue|end)",
        healing=True,
    ),
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
