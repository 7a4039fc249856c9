"""Guards that are taken away: the matrix's promise is then broken, and its tests notice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.guards import GUARDS
from tests.faults.lives import NO_FAULT, Lives
from tests.faults.matrix import entry
from tests.faults.places import kind_of, why_not
from tests.faults.test_cells import HEALS, TWO_UPDATES, check_end
from tests.faults.test_recovery import numbers
from tests.faults.ways import PHASE_TIMEOUT_S, way
from tests.faults.words import Promise

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.full_matrix]

ALONE = [guard for guard in GUARDS if guard.test]
IN_A_RUN = [guard for guard in GUARDS if not guard.test]
STEPS = {"trainer__max_training_steps": 3, "trainer__phase_timeout_s": PHASE_TIMEOUT_S}
HANGS_S = 120
ENDS_WITHIN_S = 300
"""Twice what a run takes that meets a fault and ends by its deadline."""


@pytest.mark.vllm
@pytest.mark.parametrize("guard", ALONE, ids=lambda guard: guard.name)
def test_a_test_fails_without_its_guard(guard):
    """As a test of its own: what was taken away stays away in a process."""
    command = [guard.test, "-p", "no:cacheprovider", "--layouts=all", f"--timeout={HANGS_S}"]
    body = f"{guard.planted}\nimport pytest, sys\nsys.exit(pytest.main({command}))"
    run = subprocess.run(
        [sys.executable, "-c", body], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-4000:] + run.stderr[-4000:]
    assert re.search(guard.fails, run.stdout), run.stdout[-4000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The numbers of a run whose ranks would be replaced."""
    one = Lives(tmp_path_factory.mktemp("undisturbed"))
    one.live(NO_FAULT, **STEPS | TWO_UPDATES | HEALS)
    return numbers(one)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guard", IN_A_RUN, ids=lambda guard: guard.name)
def test_a_promise_is_not_kept_without_its_guard(tmp_path, request, guard):
    from skyrl_megatron.errors import CheckpointError

    who, what, when = guard.cell
    if reason := why_not(kind_of(who, what)):
        pytest.skip(reason)
    made, promised = way(guard.cell), entry(guard.cell, healing=guard.healing).promise
    fault = made.armed({"start": 0, "save": 2, "shutdown": 3}.get(when, 1))
    if guard.when:
        fault = fault.replace(repr(made.phase), repr(guard.when))
    overrides = made.overrides | STEPS | (TWO_UPDATES | HEALS if guard.healing else {})
    same = request.getfixturevalue("undisturbed") if guard.healing else None
    one = Lives(tmp_path / "run", kind_of(who, what))
    request.addfinalizer(one.place.close)
    with pytest.raises((AssertionError, CheckpointError), match=guard.fails):
        life = one.live(fault, planted=guard.planted, timeout_s=ENDS_WITHIN_S, **overrides)
        if promised is Promise.ENDED:
            check_end(life, guard.cell)
        else:
            assert life.run.returncode == 0, f"it did not continue: {life.run.err[-4000:]}"
            assert same is None or numbers(one) == same, "other numbers"
    assert len(one.faults) == 1
