"""Guards that are taken away: what the matrix checks is then seen not to hold, so that it does check it."""

import pytest

from tests.faults.lives import NO_FAULT, Lives
from tests.faults.test_cells import HEALS, TWO_UPDATES, check_end
from tests.faults.test_healing import numbers
from tests.faults.ways import way

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]

NO_LAST_WORDS = """
import contextlib
from skyrl_megatron.entrypoints import experiment
experiment.last_words = lambda *args: contextlib.nullcontext()
"""
NO_DEADLINE = """
from skyrl_megatron.workers.actor_group import ActorGroup
make = ActorGroup.__init__
ActorGroup.__init__ = lambda self, role, actors, timeout_s: make(self, role, actors, 1e6)
"""
NO_HEALTH = """
from skyrl_megatron.inference.health import HealthMonitor
HealthMonitor.start = lambda self: None
"""
NO_WAY_BACK = """
from skyrl_megatron.workers.worker_group import WorkerGroup
WorkerGroup.roll_back = lambda self, holders: None
"""
LONGER_S = 100
"""Than a run takes that ends."""


@pytest.mark.parametrize(
    ("planted", "cell", "fails"),
    [
        (NO_LAST_WORDS, ("Ray head", "SIGKILL", "train"), "Ray's head"),
        (NO_LAST_WORDS, ("Ray node", "SIGKILL", "sample"), "Ray's node"),
    ],
    ids=["last words - head", "last words - node"],
)
def test_the_end_is_not_told(tmp_path, planted, cell, fails):
    made = way(cell)
    life = Lives(tmp_path).live(made.armed(1), planted=planted, **made.overrides | {"trainer__max_training_steps": 4})
    with pytest.raises(AssertionError, match=fails):
        check_end(life, cell)


def test_without_a_deadline_it_does_not_end(tmp_path):
    """A stopped rank is waited for as long as it stays so."""
    made = way(("policy rank, ep", "SIGSTOP", "train"))
    ended = Lives(tmp_path / "ends")
    check_end(ended.live(made.armed(1), **made.overrides), ("policy rank, ep", "SIGSTOP", "train"))
    with pytest.raises(AssertionError, match="the run did not end"):
        Lives(tmp_path / "stays").live(made.armed(1), planted=NO_DEADLINE, timeout_s=2 * LONGER_S, **made.overrides)


def test_an_engine_that_nobody_looks_after_is_not_replaced(tmp_path):
    made = way(("engine core", "SIGKILL", "sample"))
    life = Lives(tmp_path).live(
        made.armed(1), planted=NO_HEALTH, **made.overrides | {"trainer__max_training_steps": 4}
    )
    assert life.run.returncode != 0


def test_survivors_that_do_not_go_back_make_other_numbers(tmp_path):
    """Behind a step's first update the survivor has taken it, and takes it again."""
    steps = {"trainer__max_training_steps": 3} | TWO_UPDATES | HEALS
    fault = "'policy 1', 'SIGKILL', 'between updates', 1"
    found = []
    for name, planted, made in (("whole", "", NO_FAULT), ("healed", "", fault), ("planted", NO_WAY_BACK, fault)):
        lives = Lives(tmp_path / name)
        life = lives.live(made, planted=planted, **steps)
        assert life.run.returncode == 0, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
        found.append(numbers(lives))
    assert found[0] == found[1] != found[2]
