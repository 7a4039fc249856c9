"""Cells of which a test saw the promise kept: ``seen.txt``, one a line. What was not seen is no part of the matrix
that takes turns, and the page says so.

    launch/run_tests.sh --layouts=all -v tests/faults/test_cells.py | tee LOG; python -m tests.faults.seen LOG
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from tests.faults.ways import ending, lives_that_go_on, named
from tests.faults.words import Cell

FILE = Path(__file__).with_name("seen.txt")


@cache
def seen(*, healing: bool = False) -> frozenset[Cell]:
    """Return the cells; ``healing``: of what is promised where lost ranks are replaced."""
    lines = FILE.read_text().splitlines()
    found = [tuple(line.split(" · ")) for line in lines]
    return frozenset((who, what, when) for who, what, when, *more in found if bool(more) == healing)


def note(log: str) -> None:
    """Add what passed in the output of pytest (``-v``)."""
    passed = set(re.findall(r"test_cells\.py::test_the_run_\w+\[(.+?)\] PASSED", log))
    cells = [cell for cell in ending() if named(cell) in passed]
    lines = {" · ".join(cell) for cell in cells}
    for healing in (False, True):
        more = ("healing",) if healing else ()
        for name, (who, what, phases) in lives_that_go_on(healing=healing).items():
            if name in passed:
                lines |= {" · ".join((who, what, phase, *more)) for phase in phases}
    FILE.write_text("".join(f"{line}\n" for line in sorted({*FILE.read_text().splitlines(), *lines})))


if __name__ == "__main__":
    note(Path(sys.argv[1]).read_text())
