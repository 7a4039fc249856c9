"""Every cell of the matrix that a small run on one machine can be made to show (``ways.py``).

A run that ends: each cell is a life of its own, which continues from where the one before ended. A run that continues
meets all phases of a fault in one life, a step each, and its numbers are then those of a run that met none.
"""

import pytest

from tests.faults.lives import NO_FAULT, Lives
from tests.faults.matrix import NOTHING, entry
from tests.faults.places import kind_of, why_not
from tests.faults.seen import seen
from tests.faults.test_recovery import exported, numbers
from tests.faults.ways import (
    ENGINE_OF_TWO,
    LAYOUTS,
    TWO_ROLES,
    ending,
    going_on,
    in_order,
    lives_that_go_on,
    named,
    way,
)
from tests.faults.words import DEATHS

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


HEALS = {"trainer__healing__enabled": "true", "trainer__healing__max_times": 20}
TWO_UPDATES = {"trainer__policy_mini_batch_size": 2}
OFTEN = {"generator__inference_engine__restarts_per_hour": 20}


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """One run for each set of roles, as a critic's checkpoint is no other run's, and for each place."""
    known = {}

    def of(cell, overrides):
        place = kind_of(*cell[:2])
        kind = place or ("roles" if TWO_ROLES.items() <= overrides.items() else "policy")
        if kind not in known:
            known[kind] = Lives(tmp_path_factory.mktemp(kind.replace(" ", "-")), place)
        return known[kind]

    yield of
    for one in known.values():
        one.place.close()


def for_roles(overrides, one):
    """Add where a critic begins: every run has the model next to it."""
    critic = {"trainer__critic__model__path": one.folder / "model"} if TWO_ROLES.items() <= overrides.items() else {}
    return overrides | critic


def marks(known):
    """What was never seen is not run where it has to pass."""
    return () if known else pytest.mark.unseen


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=named(cell), marks=marks(cell in seen())) for cell in ending()]
)
def test_the_run_ends(lives, cell):
    if reason := why_not(kind_of(*cell[:2])):
        pytest.skip(reason)
    made = way(cell)
    one = lives(cell, made.overrides)
    before, began = len(one.faults), cell[2] != "start"
    step = one.saved + (2 if cell[2] == "save" else 1)  # a step is counted before it is saved
    last = {"trainer__max_training_steps": one.saved + (2 if cell[2] == "shutdown" else made.steps)}
    life = one.live(made.armed(step if began else 0), **for_roles(made.overrides, one) | last)
    assert len(one.faults) == before + 1, f"the fault was not made: {life.run.out[-2000:]}"
    assert life.saved >= life.began + began
    check_end(life, cell)


def check_end(life, cell):
    """The run ended as it should, with one message."""
    made = way(cell)
    assert life.run.returncode == made.code, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
    assert made.says in life.message, life.message
    assert cell[1] not in DEATHS or not life.waited, life.waited
    if not foreign(cell):
        assert "Traceback" not in life.message and 1 <= len(life.message.splitlines()) <= 2, life.message


def foreign(cell):
    """Whether what ends the run is an error that is not the run's: of a loss, say. Where it comes from is shown."""
    if cell[0] == "object store":  # whose client's errors the run puts into words of its own
        return False
    return cell[1] == "exception" or cell[:2] == ("driver", "out of memory")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What runs of as many steps come to that meet no fault, by what they are given."""
    known = {}

    def run(steps, overrides):
        key = (steps, *sorted((name, str(value)) for name, value in overrides.items()))
        if key not in known:
            one = Lives(tmp_path_factory.mktemp("undisturbed"))
            life = one.live(NO_FAULT, **for_roles(overrides, one))
            assert life.run.returncode == 0, f"{life.run.out[-2000:]}\n{life.run.err[-4000:]}"
            known[key] = (numbers(one), exported(one, steps))
        return known[key]

    return run


def cases():
    for healing in (False, True):
        for name, (who, what, phases) in lives_that_go_on(healing=healing).items():
            known = {(who, what, when) for when in phases} <= seen(healing=healing)
            yield pytest.param(who, what, phases, healing, id=name, marks=marks(known))


@pytest.mark.one_in(12)
@pytest.mark.timeout(1500)  # two lives, one of which may lose and replace a process seven times
@pytest.mark.parametrize(("who", "what", "phases", "healing"), list(cases()))
def test_the_run_goes_on(tmp_path, request, undisturbed, who, what, phases, healing):
    if reason := why_not(place := kind_of(who, what)):
        pytest.skip(reason)
    faults = [(way((who, what, phase)), step) for phase, step in in_order(phases)]
    steps = 2 * len(faults) + 1
    overrides = {key: value for made, _ in faults for key, value in made.overrides.items()}
    overrides |= {"trainer__max_training_steps": steps, "trainer__hf_save_interval": steps}
    overrides |= TWO_UPDATES | OFTEN
    overrides |= HEALS if healing else {}
    one = Lives(tmp_path / "run", place)
    request.addfinalizer(one.place.close)
    life = one.live(")\ninjection.arm(".join(made.armed(step) for made, step in faults), **for_roles(overrides, one))
    assert life.run.returncode == 0, f"{one.faults}\n{life.run.out[-4000:]}\n{life.run.err[-4000:]}"
    assert len(one.faults) == len(faults), one.faults
    if who == "registry":
        answers = (one.folder / "registry.txt").read_text().split()
        assert answers == ["500" if what == "exception" else "200"] * len(faults)
    else:
        assert "Traceback" not in life.message
    assert what not in DEATHS or not life.waited, life.waited
    if healing:
        assert sum(line["trainer/healings"] for line in one.lines) == len(faults)
    if all(entry((who, what, phase), healing=healing).lost == NOTHING for phase in phases):
        overrides.pop("trainer__phase_timeout_s", None)  # which a busy machine may not keep
        assert (numbers(one), exported(one, steps)) == undisturbed(steps, overrides)
    else:
        assert len(one.lines) == steps


def test_words_of_ways_are_known():
    assert set(LAYOUTS) and ENGINE_OF_TWO and len(ending()) > 200 and len(going_on()) > 10
    assert sum(map(len, going_on(healing=True).values())) > 100
