"""``docs/faults.md``, of the matrix."""

from __future__ import annotations

from itertools import groupby

from tests.faults.matrix import HEALING, Meaningless, Promised, entry
from tests.faults.proofs import proofs
from tests.faults.words import WHAT, WHEN, WHO, cells

HEAD = """\
# Faults

What a run promises for each fault: who is hit, by what, and when.
`python -m tests.faults.matrix` writes this page, which `launch/docs.sh` calls.

- **healed in place**: the run continues with the numbers that it would have had;
- **step repeated**: the step is taken again with the same data;
- **ended, resumable**: every process ends, with one message that names the fault and an exit code other than 0, and
  the same command resumes from the newest checkpoint.

*Deadline* is the time until the promise is kept; *may be lost* is the work that is done again. Phases in **bold** were
seen: a test in `tests/faults/proofs.py` makes the fault in real parts, and the promise is kept. The others are only
promised; `launch/run_tests.sh --layouts=all tests/faults/test_cells.py` runs all tests of them.
`tests/faults/guards.py` names what guards a promise; `tests/faults/test_planted.py` removes it and expects the promise
to be broken.
"""

HEALED = """\
## With trainer.healing.enabled=true

If one rank of two peers survives ([guide](guides/recovery.md)); otherwise the steps since the last checkpoint are
repeated.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, _count(), *_promises(), *_promises(healing=True), *_meaningless()]) + "\n"


def _count() -> str:
    promised = [cell for cell in cells() if isinstance(entry(cell), Promised)]
    proven = sum(bool(proofs(cell)) for cell in promised)
    healed = [cell for cell in promised if entry(cell, healing=True) in HEALING]
    healings = sum(bool(proofs(cell, healing=True)) for cell in healed)
    return (
        f"{len(cells())} cells: {len(cells()) - len(promised)} are meaningless, {len(promised)} have a promise, "
        f"{proven} of these were seen kept. With healing {len(healed)} have another one, "
        f"{healings} of these were seen kept.\n"
    )


def _promises(*, healing: bool = False) -> list[str]:
    lines = [
        HEALED if healing else "## Promises",
        "",
        "| who | what | when | promise | deadline | may be lost |",
        "|---|---|---|---|---|---|",
    ]
    for who in WHO:
        for what in WHAT:
            of_phases: dict[Promised, list[str]] = {}
            for when in WHEN:
                cell = (who, what, when)
                if isinstance(row := entry(cell, healing=healing), Promised) and (not healing or row in HEALING):
                    shown = f"**{when}**" if proofs(cell, healing=healing) else when
                    of_phases.setdefault(row, []).append(shown)
            lines += [
                f"| {who} | {what} | {', '.join(phases)} | {row.promise} | {row.deadline} | {row.lost} |"
                for row, phases in of_phases.items()
            ]
    return [*lines, ""]


def _meaningless() -> list[str]:
    lines = ["## Meaningless cells", "", "| who | what | when | why |", "|---|---|---|---|"]
    rows = []
    for who in WHO:
        for what in WHAT:
            of_phases: dict[str, list[str]] = {}
            for when in WHEN:
                if isinstance(row := entry((who, what, when)), Meaningless):
                    of_phases.setdefault(row.why, []).append(when)
            rows += [
                (who, "all" if len(of) == len(WHEN) else ", ".join(of), why, what) for why, of in of_phases.items()
            ]
    for (who, when, why), group in groupby(
        sorted(rows, key=lambda row: (WHO.index(row[0]), *row[1:3])), lambda r: r[:3]
    ):
        lines.append(f"| {who} | {', '.join(what for *_, what in group)} | {when} | {why} |")
    return lines
