"""How a cell of the matrix is made in a small real run: ``way(cell)``. Cells without one need more than a run on one
machine, or what no process can be made to do from outside; tests of their own may prove them (``proofs.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from tests.faults import object_store
from tests.faults.injection import EXITED, OWN, UNEXPECTED
from tests.faults.matrix import HEALING, Promised, entry
from tests.faults.words import BYTES, DEATHS, ENGINES, IN_DRIVER, RANKS, RAY, STEP, Cell, Promise, cells

PHASES = {
    "start": "build_models",
    "sample": "generate",
    "score": "fwd_logprobs_values_reward",
    "train": "policy_train",
    "save": "save_checkpoints",
    "sync": "sync_weights",
    "eval": "eval",
    "shutdown": "finish",
}
"""Phase of the matrix → of a trainer."""
_SIZE = "trainer__policy__megatron_config__"
LAYOUTS = {
    "policy rank, first stage": {_SIZE + "pipeline_model_parallel_size": 2, _SIZE + "expert_model_parallel_size": 1},
    "policy rank, last stage": {_SIZE + "pipeline_model_parallel_size": 2, _SIZE + "expert_model_parallel_size": 1},
    "policy rank, tp": {_SIZE + "tensor_model_parallel_size": 2, _SIZE + "expert_model_parallel_size": 1},
    "policy rank, ep": {},
    "policy rank, dp": {_SIZE + "expert_model_parallel_size": 1},
}
"""Two ranks of a policy, at these positions."""
TWO_ROLES = {
    "trainer__algorithm__advantage_estimator": "gae",
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__placement__ref_num_gpus_per_node": 1,
    "trainer__ref__megatron_config__expert_model_parallel_size": 1,
    "trainer__placement__critic_num_gpus_per_node": 2,
    "trainer__critic__megatron_config__expert_model_parallel_size": 2,
    "trainer__critic_mini_batch_size": 2,
    "trainer__critic__optimizer_config__lr": 1e-3,
}
"""A critic on two ranks and a frozen reference on one."""
ENGINE_OF_TWO = {"generator__inference_engine__tensor_parallel_size": 2}
REGISTRY = {
    "generator__inference_engine__enable_registry": "true",
    "generator__inference_engine__registry_port": 0,
}
PLACES = ("disk", "network link", "object store", "clock")
"""What a run has for itself (``places.py``)."""
VICTIMS = {
    "driver": "driver",
    **dict.fromkeys(RANKS, "policy 1"),
    "policy rank, first stage": "policy 0",
    "reference": "ref 0",
    "critic": "critic 1",
    **{name: name for name in ENGINES},
    "Ray head": "gcs_server",
    "Ray node": "raylet",
    "environment": "environment",
    "registry": "registry",
    **{name: name for name in PLACES},
}
"""Who of the matrix → as ``injection`` calls it."""
SAID = {
    "driver": "the run's process",
    "reference": "ref rank 0",
    "critic": "critic rank 1",
    "Ray head": "Ray's head",
    "Ray node": "Ray's node",
    "engine core": "engine",
    "engine worker": "engine",
    "policy rank, first stage": "policy rank 0",
    **dict.fromkeys(RANKS[1:], "policy rank 1"),
}
"""What the one message holds."""
PHASE_TIMEOUT_S = 120
OWN_CODE_S = 0.5
"""After which a new process of an engine runs vLLM's code; before, Python's own reads what it is to do."""
LONG = 400
"""Steps: a head that hangs is missed after a minute."""
REFUSES = {
    "full disk": "No space left on device",
    "read-only disk": "Read-only file system",
    "EIO": "Input/output error",
}


@dataclass(frozen=True)
class Way:
    """A fault as ``injection.arm`` makes it."""

    who: str
    what: str
    phase: str
    delay_s: float = 0.05
    lasts_s: float = 10.0
    overrides: dict[str, object] = field(default_factory=dict)
    """Of the run that meets it."""
    code: int | None = 1
    """What the run ends with; None: anything but 0."""
    says: str = ""
    steps: int = 4
    """How far the run would go beyond what is saved."""

    def armed(self, step: int) -> str:
        """Return the arguments for a fault after ``step`` whole steps."""
        return f"{self.who!r}, {self.what!r}, {self.phase!r}, {step}, delay_s={self.delay_s}, lasts_s={self.lasts_s}"


def way(cell: Cell) -> Way | None:
    """Return how a cell is made; None where this is no place for it."""
    who, what, when = cell
    if not isinstance(entry(cell), Promised) or who not in VICTIMS:
        return None
    phase, name, delay_s, code = PHASES[when], what, 0.05, 1
    if who in PLACES:
        if what in BYTES:
            return None  # of files: tests of their own; of a bucket: TCP would send the packet again
        if cell[::2] == ("object store", "sync"):
            return None  # versions are published during a run
        name, delay_s = what, 0.0
    elif who in IN_DRIVER:
        delay_s = 0.0
    elif what == "slow ×10":
        name = "slow"
    elif what in OWN:
        if who in RAY:
            name = "SIGTERM"
        elif who not in ENGINES:
            delay_s = 0.0
        elif when == "start":
            delay_s = OWN_CODE_S
    if who == "driver":
        code = {"SIGKILL": -9, "SIGSEGV": -11, "exit": EXITED}.get(what, 1)
    if who == "critic" and when == "train":
        phase = "critic_train"
    overrides: dict[str, object] = {}
    restarts = who in ENGINES and when != "start"  # within the phase, after a minute of silence
    if (what == "SIGSTOP" and not restarts) or (who == "network link" and what == "cut link"):
        overrides = {"trainer__phase_timeout_s": PHASE_TIMEOUT_S}
    overrides |= LAYOUTS.get(who, {})
    if who in ("reference", "critic"):
        overrides |= TWO_ROLES
    if who in ENGINES:
        overrides |= ENGINE_OF_TWO
    if who == "registry":
        overrides |= REGISTRY
    if when == "eval":
        overrides |= {"trainer__eval_interval": 1}
    says = SAID.get(who, "") or REFUSES.get(what, "")
    if what == "exception":
        says = UNEXPECTED
    elif who == "driver" and what not in DEATHS:
        says = "MemoryError"
    if who == "object store":
        says = object_store.BUCKET
    if what == "SIGSTOP" and who not in RAY:
        says = "trainer.phase_timeout_s"
    steps = LONG if (who, what) == ("Ray head", "SIGSTOP") else 4
    return Way(VICTIMS[who], name, phase, delay_s, 10.0, overrides, code, says, steps)


@cache
def ending(*, healing: bool = False) -> list[Cell]:
    """List the cells with a way whose promise is that the run ends."""
    return [cell for cell in cells() if _promise(cell, healing) is Promise.ENDED and way(cell)]


@cache
def going_on(*, healing: bool = False) -> dict[tuple[str, str], list[str]]:
    """List the cells with a way whose promise is that the run continues: (who, what) → phases. ``healing``: those that
    have this promise where lost ranks are replaced, and no other."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells():
        own = entry(cell, healing=True) in HEALING
        if _promise(cell, healing) not in (None, Promise.ENDED) and own == healing and way(cell):
            found.setdefault(cell[:2], []).append(cell[2])
    return found


STOPS_IN_A_LIFE = 2
"""Processes that are stopped are waited for, by deadlines: a test of all phases would take twenty minutes."""


def lives_that_go_on(*, healing: bool = False) -> dict[str, tuple[str, str, list[str]]]:
    """Return who meets what in which phases of one life, by the name of its test."""
    found = {}
    for (who, what), phases in going_on(healing=healing).items():
        most = STOPS_IN_A_LIFE if what == "SIGSTOP" else len(phases)
        for first in range(0, len(phases), most):
            part = phases[first : first + most]
            words = (
                who,
                what,
                *([", ".join(part)] if len(part) < len(phases) else []),
                *(["healing"] if healing else []),
            )
            found[named(words)] = (who, what, part)
    return found


def named(words: tuple[str, ...]) -> str:
    """Return the name of a test, in which nothing has to be escaped."""
    return " - ".join(words).replace("×", "x")


def _promise(cell: Cell, healing: bool) -> Promise | None:
    row = entry(cell, healing=healing)
    return row.promise if isinstance(row, Promised) else None


def in_order(phases: list[str]) -> list[tuple[str, int]]:
    """Give each phase a step of its own, every other one from 0 on, so that what is lost in one is missed before the
    next: in the order of a step, those of start first and of shutdown last. The sync before the first step is part of
    the start, so a first phase ``sync`` is that of the first step.

    >>> in_order(["shutdown", "train", "sample"])
    [('sample', 0), ('train', 2), ('shutdown', 4)]
    >>> in_order(["sync", "eval"])
    [('sync', 1), ('eval', 3)]
    """
    order = ["start", *STEP, "shutdown"]
    ordered = sorted(phases, key=order.index)
    first = int(ordered[0] == "sync")
    return [(phase, 2 * number + first) for number, phase in enumerate(ordered)]
