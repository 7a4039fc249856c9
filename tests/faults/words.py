"""The words of the matrix: who may be hit, by what, and when."""

from __future__ import annotations

from enum import StrEnum
from itertools import product

RANKS = (
    "policy rank, first stage",
    "policy rank, last stage",
    "policy rank, tp",
    "policy rank, ep",
    "policy rank, dp",
)
FROZEN = ("reference",)
ROLES = (*RANKS, *FROZEN, "critic")
ENGINES = ("engine core", "engine worker")
RAY = ("Ray head", "Ray node")
PROCESSES = ("driver", *ROLES, *ENGINES, *RAY)
IN_DRIVER = ("environment", "registry")
"""What runs in the driver's process, in threads or on its event loop."""
WHO = (*PROCESSES, *IN_DRIVER, "object store", "network link", "disk", "clock")

DEATHS = ("SIGKILL", "SIGSEGV", "exit")
DISK = ("full disk", "read-only disk", "EIO")
BYTES = ("byte in checkpoint", "byte in bucket", "byte in metrics", "byte in segment")
WHAT = (
    "SIGKILL",
    "SIGSTOP",
    "SIGSEGV",
    "exit",
    "exception",
    "slow ×10",
    "cut link",
    *DISK,
    *BYTES,
    "out of memory",
    "jump",
)

WHEN = ("start", "sample", "score", "train", "save", "sync", "eval", "shutdown")
STEP = ("sample", "score", "train", "save", "sync", "eval")
WORKS = {RANKS: ("score", "train", "save", "sync"), ("critic",): ("score", "train", "save"), FROZEN: ("score",)}
"""Phases in which the driver waits for ranks; in the others a rank's death is noticed when it is next called."""


class Promise(StrEnum):
    """What becomes of the run."""

    HEALED = "healed in place"
    REPEATED = "step repeated"
    ENDED = "ended, resumable"


type Cell = tuple[str, str, str]
"""(who, what, when)."""


def cells() -> list[Cell]:
    """List every cell there is."""
    return list(product(WHO, WHAT, WHEN))


def among(cell: Cell, who: tuple[str, ...], what: tuple[str, ...], when: tuple[str, ...]) -> bool:
    """Whether ``cell`` is in the product of the three; an empty one stands for all."""
    return all(not asked or word in asked for word, asked in zip(cell, (who, what, when), strict=True))
