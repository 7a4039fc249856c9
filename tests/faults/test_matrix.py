"""Cells of the matrix in real runs: a fault is made in a phase of a step, and what is promised is checked.

The lives of one run follow one another: what a fault left is where the next one begins, so that each cell costs one
start and proves on the way that the one before can be gone on from. The last life ends well, and the numbers of all
steps must then be those of a run that met no fault."""

from dataclasses import dataclass

import pytest

from tests.faults.lives import NO_FAULT, STEPS, Lives

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


@dataclass(frozen=True)
class Fault:
    """A fault that ends the run. ``phase``: as the trainer calls it. ``says``: what its one message holds."""

    who: str
    what: str
    phase: str
    says: str
    saves: int = 0
    """Steps that are saved before it ends."""
    code: int = 1
    delay_s: float = 0.05


FAULTS = [
    Fault("policy 1", "SIGKILL", "policy_train", "policy rank 1", saves=1),
    Fault("policy 0", "SIGSEGV", "sync_weights", "policy rank 0", saves=1),
    Fault("policy 0", "full disk", "save_checkpoints", "cannot write", delay_s=0),
    Fault("policy 1", "SIGSTOP", "policy_train", "trainer.phase_timeout_s"),
    Fault("driver", "SIGKILL", "sync_weights", "", saves=1, code=-9),
]


def named(fault):
    return f"{fault.who} · {fault.what} · {fault.phase}"


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives(tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_the_run_ends_with_one_message_and_goes_on(lives, fault):
    made = len(lives.faults)
    life = lives.live(
        f"{fault.who!r}, {fault.what!r}, {fault.phase!r}, {lives.saved + fault.saves}, delay_s={fault.delay_s}"
    )
    assert len(lives.faults) == made + 1, f"the fault was not made: {life.run.out[-2000:]}"
    assert life.run.returncode == fault.code, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
    assert life.saved == life.began + fault.saves
    if fault.code > 0:
        assert fault.says in life.message and "Traceback" not in life.message, life.message
        assert fault.what != "SIGSTOP" or "policy rank 0" in lives.stacks
        assert len(life.message.splitlines()) <= 2, f"more than one message: {life.message}"


def test_an_engine_is_replaced_and_the_numbers_are_those_of_no_fault(lives, tmp_path_factory):
    """The last life loses its engine while it samples, continues, and ends well."""
    last = lives.saved + 2
    life = lives.live(f"'engine core', 'SIGKILL', 'generate', {lives.saved}", trainer__max_training_steps=last)
    assert life.run.returncode == 0, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
    undisturbed = Lives(tmp_path_factory.mktemp("undisturbed"))
    whole = undisturbed.live(NO_FAULT, trainer__max_training_steps=last)
    assert whole.run.returncode == 0
    lasting = ("policy/", "reward/", "loss/", "generate/avg_num")
    assert [line["step"] for line in lives.lines] == list(range(1, last + 1))
    for one, two in zip(lives.lines, undisturbed.lines, strict=True):
        kept = [name for name in two if name.startswith(lasting) and "_per_" not in name and "memory" not in name]
        assert len(kept) > 15 and {name: one[name] for name in kept} == {name: two[name] for name in kept}


def test_steps_are_enough():
    assert len(FAULTS) + 2 < STEPS
