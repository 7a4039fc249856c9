"""Which test proves which cells of the matrix. A proof names what the test really does to a real part; where it hits
one position of several that are handled alike, it proves that position alone."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.seen import seen
from tests.faults.ways import ending
from tests.faults.words import BYTES, ENGINES, Cell, among

type Words = tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """A test, and the cells that it proves: the product of the three, each with at least one word."""

    test: str
    who: Words
    what: Words
    when: Words
    healing: bool = False
    """Whether it is of what is promised where lost ranks are replaced."""


LOST_ENGINE = "tests/inference/test_engines.py::test_requests_of_a_lost_engine_are_made_again_and_it_comes_back"
LOST_IN_SYNC = "tests/weight_sync/test_sync.py::test_an_engine_that_is_lost_is_restarted_and_synced"

ENDS = "tests/faults/test_matrix.py::test_the_run_ends_with_one_message_and_goes_on"
REPLACED = "tests/faults/test_matrix.py::test_an_engine_is_replaced_and_the_numbers_are_those_of_no_fault"

REPLACED_RANKS = "tests/faults/test_recovery.py::test_lost_ranks_are_replaced_and_the_numbers_are_those_of_no_fault"
OTHER_ROLES = "tests/faults/test_recovery.py::test_ranks_of_other_roles_are_replaced"
EP = ("policy rank, ep",)

CELLS_END = "tests/faults/test_cells.py::test_the_run_ends"
CELLS_GO_ON = "tests/faults/test_cells.py::test_the_run_goes_on"
"""Of every cell that a small run can be made to show (``ways.py``), where they were seen to pass (``seen.py``)."""

PROOFS = (
    Proof(REPLACED_RANKS, EP, ("SIGKILL",), ("train", "sync", "save", "sample"), healing=True),
    Proof(REPLACED_RANKS, EP, ("SIGSEGV",), ("score",), healing=True),
    Proof(
        "tests/faults/test_recovery.py::test_a_stopped_rank_is_replaced", EP, ("SIGSTOP",), ("train",), healing=True
    ),
    Proof(OTHER_ROLES, ("reference",), ("SIGKILL",), ("score",), healing=True),
    Proof(OTHER_ROLES, ("critic",), ("SIGKILL",), ("train",), healing=True),
    Proof(ENDS, ("policy rank, ep",), ("SIGKILL", "SIGSTOP"), ("train",)),
    Proof(ENDS, ("policy rank, ep",), ("SIGSEGV",), ("sync",)),
    Proof(ENDS, ("driver",), ("SIGKILL",), ("sync",)),
    Proof(REPLACED, ENGINES[:1], ("SIGKILL",), ("sample",)),
    Proof(
        "tests/job/test_run.py::test_a_run_that_is_ended_leaves_nothing_and_loses_nothing",
        ("driver",),
        ("SIGKILL",),
        ("sample",),
    ),
    Proof(
        "tests/job/test_workers.py::test_one_rank_fails_the_call_and_ends_the_group",
        ("policy rank, dp",),
        ("exit", "exception", "SIGSTOP"),
        ("train",),
    ),
    Proof(
        "tests/weight_sync/test_layouts.py::test_a_rank_that_dies_ends_the_sync",
        ("policy rank, tp", "policy rank, ep"),
        ("SIGKILL",),
        ("sync",),
    ),
    Proof(
        "tests/checkpoint/test_faults.py::test_one_rank_of_two_is_killed",
        ("policy rank, dp",),
        ("SIGKILL",),
        ("save",),
    ),
    Proof("tests/checkpoint/test_faults.py::test_killed", ("policy rank, first stage",), ("SIGKILL",), ("save",)),
    Proof(LOST_ENGINE, ENGINES, ("SIGKILL", "SIGSTOP"), ("sample",)),
    Proof(
        "tests/job/test_fully_async.py::test_an_engine_that_dies_mid_stream_is_replaced",
        ("engine worker",),
        ("SIGKILL",),
        ("score",),
    ),
    Proof(LOST_IN_SYNC, ("engine worker",), ("SIGKILL", "SIGSTOP"), ("sync",)),
    Proof(
        "tests/weight_sync/test_layouts.py::test_ranks_stay_in_step_when_an_engine_is_lost",
        ("engine worker",),
        ("SIGKILL", "SIGSTOP"),
        ("sync",),
    ),
    Proof(
        "tests/inference/test_families_and_starts.py::test_an_engine_that_fails_at_start_says_why",
        ENGINES[:1],
        ("exception",),
        ("start",),
    ),
    Proof(
        "tests/job/test_fully_async.py::test_sampling_runs_ahead_within_the_bound",
        ("environment",),
        ("exception",),
        ("sample",),
    ),
    Proof(
        "tests/envs/test_registry.py::test_pool_gives_up_on_calls_that_hang",
        ("environment",),
        ("slow ×10",),
        ("sample",),
    ),
    Proof(
        "tests/weight_sync/test_sync.py::test_a_faulty_update_is_never_served",
        ("network link",),
        ("byte in bucket",),
        ("sync",),
    ),
    Proof(
        "tests/faults/test_object_store.py::test_what_was_published_stays",
        ("object store",),
        ("exception", "slow ×10", "cut link"),
        ("sync",),
    ),
    Proof(
        "tests/tools/test_weight_versions.py::test_damage_is_named_and_never_served",
        ("object store",),
        BYTES[:1],
        ("start",),
    ),
    Proof("tests/checkpoint/test_damage.py::test_damage", ("disk",), ("byte in checkpoint",), ("start",)),
    Proof("tests/checkpoint/test_faults.py::test_disk_is_full", ("disk",), ("full disk",), ("save",)),
    Proof("tests/checkpoint/test_faults.py::test_folder_is_read_only", ("disk",), ("read-only disk",), ("save",)),
    Proof(
        "tests/trainer/test_journal.py::test_a_full_disk_ends_it_with_what_is_there_kept",
        ("disk",),
        ("full disk",),
        ("sample",),
    ),
    Proof(
        "tests/observe/test_tracking.py::test_a_damaged_line_is_left_out_and_costs_no_other",
        ("disk",),
        ("byte in metrics",),
        ("start",),
    ),
    Proof("tests/trainer/test_journal.py::test_any_flipped_bit_is_named", ("disk",), ("byte in segment",), ("start",)),
)


def proofs(cell: Cell, *, healing: bool = False) -> list[str]:
    """Return the tests that prove a cell, by node id; ``healing``: of what is promised where ranks are replaced."""
    found = [
        proof.test for proof in PROOFS if proof.healing == healing and among(cell, proof.who, proof.what, proof.when)
    ]
    if cell in seen(healing=healing):
        found.append(CELLS_END if cell in ending() and not healing else CELLS_GO_ON)
    return found
