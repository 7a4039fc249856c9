"""Every fault: who × what × when. ``python -m tests.faults.matrix > docs/faults.md`` writes the table.

A cell is meaningless, for a reason (:data:`MEANINGLESS`), or has a promise (:data:`PROMISES`); the first entry that
holds it counts. Whether the promise was ever seen kept is another matter: the tests that prove a cell are in
:mod:`tests.faults.proofs`, and a cell without one says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.words import BYTES, DEATHS, DISK, ENGINES, RAY, ROLES, STEP, WHAT, WORKS, Cell, Promise, among

type Words = tuple[str, ...]


@dataclass(frozen=True)
class Meaningless:
    """Cells that cannot happen, and why."""

    why: str
    who: Words = ()
    what: Words = ()
    when: Words = ()


@dataclass(frozen=True)
class Promised:
    """Cells with one promise. ``deadline``: from the fault to the promise kept; ``lost``: what may be lost."""

    promise: Promise
    deadline: str
    lost: str
    who: Words = ()
    what: Words = ()
    when: Words = ()


NOT_SIGNALS = tuple(what for what in WHAT if what not in (*DEATHS, "SIGSTOP"))
OF_PROCESSES = (*DEATHS, "SIGSTOP", "exception", "slow ×10", "out of memory")

MEANINGLESS = (
    Meaningless("clocks alone jump, and do nothing else here", ("clock",), tuple(w for w in WHAT if w != "jump")),
    Meaningless(
        "a jump of the clock is the clock's row",
        what=("jump",),
        who=("driver", *ROLES, *ENGINES, *RAY, "environment", "registry", "object store", "network link", "disk"),
    ),
    Meaningless(
        "a thread of the driver: the driver's row", ("environment", "registry"), (*DEATHS, "SIGSTOP", "out of memory")
    ),
    Meaningless(
        "called while samples are made, and at no other time",
        ("environment",),
        when=("start", "score", "train", "save", "sync", "shutdown"),
    ),
    Meaningless(
        "no disk and no link of its own: those have rows",
        ("driver", *ROLES, *ENGINES, *RAY, "environment", "registry"),
        ("cut link", *DISK, *BYTES),
    ),
    Meaningless("nothing is called in a rank any more", ROLES, ("exception", "out of memory"), ("shutdown",)),
    Meaningless("no Python: what fails there ends the process, as exit does", RAY, ("exception", "out of memory")),
    Meaningless("not a process", ("object store", "network link", "disk"), (*DEATHS, "SIGSTOP", "out of memory")),
    Meaningless(
        "a link has no disk",
        ("network link",),
        (*DISK, "byte in checkpoint", "byte in metrics", "byte in segment", "exception"),
    ),
    Meaningless("a store elsewhere reports its disk as refused requests: exception", ("object store",), DISK),
    Meaningless(
        "neither metrics, journals nor buckets are kept there",
        ("object store",),
        ("byte in metrics", "byte in segment", "byte in bucket"),
    ),
    Meaningless(
        "checkpoints are read at the start and written in a save; versions at a sync",
        ("object store",),
        when=("sample", "score", "train", "eval", "shutdown"),
    ),
    Meaningless("a bucket is never on a disk", ("disk",), ("byte in bucket", "cut link")),
    Meaningless("a disk refuses or fails: full, read-only, EIO", ("disk",), ("exception",)),
    Meaningless(
        "buckets are on their way in a sync alone",
        what=("byte in bucket",),
        when=("start", "sample", "score", "train", "save", "eval", "shutdown"),
    ),
    Meaningless(
        "files of a checkpoint are read at the start and nowhere else",
        what=("byte in checkpoint",),
        when=(*STEP, "shutdown"),
    ),
    Meaningless(
        "journals and metrics are read at the start and nowhere else",
        what=("byte in metrics", "byte in segment"),
        when=(*STEP, "shutdown"),
    ),
    Meaningless("nothing is written or read from a disk there", ("disk",), DISK, ("sync", "score")),
)

NOTHING, STEP_LOST = "nothing", "the step under way"
AS_STOPPED = "trainer.phase_timeout_s"
GIVES_UP = "when the store's client gives up: s3fs 7 min, with AWS_MAX_ATTEMPTS=1 1 to 2 min"

PROMISES = (
    # the driver
    Promised(
        Promise.ENDED,
        "60 s until no process is left",
        "what was not saved",
        ("driver",),
        ("SIGKILL", "SIGSEGV", "exit", "out of memory"),
    ),
    Promised(Promise.ENDED, "60 s", STEP_LOST, ("driver",), ("exception",)),
    Promised(Promise.HEALED, "once it continues", NOTHING, ("driver",), ("SIGSTOP", "slow ×10")),
    # ranks
    Promised(
        Promise.HEALED, "at once: a rank that ends late is killed", NOTHING, ROLES, (*OF_PROCESSES,), ("shutdown",)
    ),
    Promised(Promise.HEALED, "no hurry: a straggler is named", NOTHING, ROLES, ("slow ×10",)),
    Promised(Promise.ENDED, AS_STOPPED, STEP_LOST, ROLES, ("SIGSTOP",)),
    *(
        Promised(Promise.ENDED, "5 s", STEP_LOST, who, (*DEATHS, "exception", "out of memory"), ("start", *works))
        for who, works in WORKS.items()
    ),
    Promised(Promise.ENDED, "when it is next called", STEP_LOST, ROLES, (*DEATHS, "exception", "out of memory")),
    # engines
    Promised(
        Promise.ENDED, "the engine's start", NOTHING, ENGINES, (*DEATHS, "exception", "out of memory"), ("start",)
    ),
    Promised(Promise.ENDED, AS_STOPPED, NOTHING, ENGINES, ("SIGSTOP",), ("start",)),
    Promised(Promise.HEALED, "at once: what is left is killed", NOTHING, ENGINES, (*OF_PROCESSES,), ("shutdown",)),
    Promised(
        Promise.HEALED,
        "10 s until it is known, then a start of an engine",
        NOTHING,
        ENGINES,
        (*DEATHS, "exception", "out of memory"),
    ),
    Promised(
        Promise.HEALED,
        f"10 s until it is known, within a sync {AS_STOPPED}, then a start of an engine",
        NOTHING,
        ENGINES,
        ("SIGSTOP",),
    ),
    Promised(Promise.HEALED, "no hurry", NOTHING, ENGINES, ("slow ×10",)),
    # Ray
    Promised(Promise.HEALED, "30 s: it continues", NOTHING, RAY, ("SIGSTOP",), ("shutdown",)),
    Promised(Promise.HEALED, "once it continues", NOTHING, RAY, ("slow ×10",)),
    Promised(Promise.ENDED, "2 min: it is missed after 70 to 100 s", STEP_LOST, RAY, ("SIGSTOP",)),
    Promised(Promise.ENDED, "90 s", STEP_LOST, RAY, DEATHS),
    # what runs in the driver
    Promised(Promise.HEALED, "at once: it is left out", "the trajectory", ("environment",), ("exception",)),
    Promised(Promise.HEALED, "the environment's timeout", NOTHING, ("environment",), ("slow ×10",)),
    Promised(Promise.HEALED, "at once: the request is refused", NOTHING, ("registry",), ("exception", "slow ×10")),
    # stores, links, disks
    Promised(Promise.ENDED, "at once", "the checkpoint in work", ("object store",), ("exception",), ("save",)),
    Promised(Promise.ENDED, "at once", NOTHING, ("object store",), ("exception",)),
    Promised(Promise.ENDED, GIVES_UP, "the checkpoint in work", ("object store",), ("cut link",), ("save",)),
    Promised(Promise.ENDED, GIVES_UP, NOTHING, ("object store",), ("cut link",)),
    Promised(Promise.HEALED, "no hurry", NOTHING, ("object store",), ("slow ×10",)),
    Promised(
        Promise.HEALED,
        "at once: the checkpoint before is loaded",
        "the steps after it",
        ("object store", "disk"),
        ("byte in checkpoint",),
    ),
    Promised(
        Promise.HEALED,
        "at once: the bucket is refused, the engine restarted or the sync ended",
        NOTHING,
        ("network link",),
        ("byte in bucket",),
    ),
    Promised(Promise.HEALED, "the link's", NOTHING, ("network link",), ("slow ×10",)),
    Promised(Promise.ENDED, f"{AS_STOPPED} at most", STEP_LOST, ("network link",), ("cut link",)),
    Promised(Promise.ENDED, "at once", "the checkpoint in work", ("disk",), DISK, ("save",)),
    Promised(Promise.ENDED, "at once", NOTHING, ("disk",), DISK),
    Promised(Promise.HEALED, "no hurry", NOTHING, ("disk",), ("slow ×10",)),
    Promised(Promise.HEALED, "at once: a line that is none is left out", "that line", ("disk",), ("byte in metrics",)),
    Promised(Promise.ENDED, "at once, with file and byte", NOTHING, ("disk",), ("byte in segment",)),
    # clocks
    Promised(Promise.HEALED, "none: deadlines are of a clock that does not jump", NOTHING, ("clock",), ("jump",)),
)


LOST = DEATHS
"""A rank whose memory does not suffice would lack it again: that ends the run, except one that the system killed."""
A_START = "then a start of a rank"
HEALING = (
    Promised(Promise.REPEATED, f"5 s until it is known, {A_START}", NOTHING, ROLES, LOST, ("score", "train")),
    Promised(Promise.HEALED, f"5 s until it is known, {A_START}", NOTHING, ROLES, LOST, ("save", "sync")),
    Promised(Promise.HEALED, f"when it is next called, {A_START}", NOTHING, ROLES, LOST, ("sample", "eval")),
    Promised(Promise.REPEATED, f"{AS_STOPPED}, {A_START}", NOTHING, ROLES, ("SIGSTOP",), STEP),
)
"""What is promised instead with ``trainer.healing.enabled=true``."""


def entry(cell: Cell, *, healing: bool = False) -> Meaningless | Promised | None:
    """Return what is said of a cell; None where nothing is, which a test refuses. ``healing``: where lost ranks are
    replaced."""
    for row in (*MEANINGLESS, *(HEALING if healing else ()), *PROMISES):
        if among(cell, row.who, row.what, row.when):
            return row
    return None


if __name__ == "__main__":
    from tests.faults.page import page

    print(page(), end="")
