"""The matrix is whole, says nothing twice without effect, and names tests that are there."""

import ast
from pathlib import Path

import pytest

from tests.faults.guards import GUARDS, UNGUARDED
from tests.faults.matrix import HEALING, MEANINGLESS, PROMISES, Promised, entry
from tests.faults.page import page
from tests.faults.proofs import PROOFS, proofs
from tests.faults.words import WHAT, WHEN, WHO, among, cells

ROOT = Path(__file__).resolve().parents[2]


def test_every_cell_has_an_entry():
    missing = [cell for cell in cells() if entry(cell) is None]
    assert not missing, f"{len(missing)}: {missing[:20]}"


@pytest.mark.parametrize("row", [*MEANINGLESS, *PROMISES, *HEALING, *PROOFS], ids=str)
def test_words_are_known(row):
    for said, known in ((row.who, WHO), (row.what, WHAT), (row.when, WHEN)):
        assert isinstance(said, tuple) and set(said) <= set(known), set(said) - set(known)


def test_every_entry_is_that_of_some_cell():
    used = {id(entry(cell, healing=healing)) for cell in cells() for healing in (False, True)}
    assert not [row for row in (*MEANINGLESS, *PROMISES, *HEALING) if id(row) not in used]


@pytest.mark.around
@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: f"{proof.test} {proof.who[0]} {proof.what[0]}")
def test_a_proof_is_a_test_of_cells_with_a_promise(proof):
    assert proof.who and proof.what and proof.when, "a proof says of what it is one"
    proven = [cell for cell in cells() if among(cell, proof.who, proof.what, proof.when)]
    assert all(isinstance(entry(cell), Promised) for cell in proven), "of a cell that cannot happen"
    assert not proof.healing or all(entry(cell, healing=True) in HEALING for cell in proven)
    path, name = proof.test.split("::")
    functions = {each.name for each in ast.parse((ROOT / path).read_text()).body if isinstance(each, ast.FunctionDef)}
    assert name.partition("[")[0] in functions, f"no such test: {proof.test}"


def test_what_is_not_proven_has_no_test():
    """Guards the page's count: a cell is proven by a test that is named for it, and by nothing else."""
    assert proofs(("driver", "SIGKILL", "sample")) and not proofs(("clock", "byte in bucket", "start"))


def test_the_page_shows_every_promise():
    """With the phases that were seen in bold, and each promise of a run with healing too."""
    text = page()
    promised = [cell for cell in cells() if isinstance(entry(cell), Promised)]
    assert f"{len(cells())} cells: " in text and f", {len(promised)} have a promise, " in text
    for who, what, when in promised:
        row = entry((who, what, when))
        shown = f"**{when}**" if proofs((who, what, when)) else when
        lines = [line for line in text.splitlines() if line.startswith(f"| {who} | {what} | ") and shown in line]
        assert any(line.endswith(f"| {row.promise} | {row.deadline} | {row.lost} |") for line in lines), (
            who,
            what,
            when,
        )
    assert all(row.deadline in text.split("## With trainer.healing.enabled=true")[1] for row in HEALING)


def said(row):
    return row.promise, row.deadline, row.lost


def reasons(cell):
    return [each for each in UNGUARDED if among(cell, each.who, each.what, each.when)]


def test_every_promise_has_a_guard_that_was_taken_away_or_a_reason():
    guarded = {said(entry(guard.cell, healing=guard.healing)) for guard in GUARDS}
    needed = set()
    for healing, rows in ((False, PROMISES), (True, HEALING)):
        for row in rows:
            own = [reasons(cell) for cell in cells() if entry(cell, healing=healing) is row]
            assert said(row) in guarded or all(own), row
            needed |= {each for found in own for each in found if said(row) not in guarded}
    assert needed == set(UNGUARDED)
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)
