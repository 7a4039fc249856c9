"""Two workers side by side (pytest-xdist, ``-n 2``): which of them runs which module.

A module is run by one worker, which takes its next module when it is almost done with one. Modules are ordered by what
they last took (``tests/durations.json``): those with the rank pool first, the longest of them first, then the others,
the longest last. The first worker takes modules from the front and the others from the back. So the pool computes
next to what waits (Ray starts, browsers, shells), it is started once while both have work of their own, and they meet
among short modules. The full matrix follows in its own order, a block to whoever is free.

The workers collect the tests and the controller gets their names alone. So a worker writes the units of its collection
into a folder that all processes of the run share.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
UNKNOWN_S = 5.0  # a module that was never recorded
RUN_FOLDER = pytest.StashKey[Path]()


def module_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def unit_of(item: pytest.Item) -> str:
    """What has to be run by one worker, in order: a module, or all that share an ``xdist_group`` or engines."""
    group = item.get_closest_marker("xdist_group") or item.get_closest_marker("engines")
    return module_of(item.nodeid) if group is None else str(group.args[0])


def recorded() -> dict[str, float]:
    """Module → seconds that its tests took, without those of the matrix."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def arrange(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """Return the tests in the order that the workers take from both ends."""
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(unit_of(item), []).append(item)

    def place(unit: str) -> tuple[bool, float]:
        pooled = any("ranks" in getattr(item, "fixturenames", ()) for item in units[unit])
        cost = sum(seconds.get(module, UNKNOWN_S) for module in {module_of(item.nodeid) for item in units[unit]})
        return not pooled, -cost if pooled else cost

    return [item for unit in sorted(units, key=place) for item in units[unit]]


def write_units(folder: Path, items: Sequence[pytest.Item]) -> None:
    """Write the units of a collection: part and number of tests of each. All workers write the same."""
    parts = ("full_matrix" if item.get_closest_marker("full_matrix") else "plain" for item in items)
    runs = groupby(zip(parts, map(unit_of, items), strict=True))
    _, path = tempfile.mkstemp(dir=folder)
    Path(path).write_text(json.dumps([(part, len(list(tests))) for (part, _), tests in runs]))
    os.replace(path, folder / "units.json")


class BothEnds(LoadScopeScheduling):
    """The first worker takes units from the front, the others from the back; then all take the matrix in its order."""

    def schedule(self) -> None:
        if self.collection is None:
            units = json.loads((self.config.stash[RUN_FOLDER] / "units.json").read_text())
            names = iter(next(iter(self.registered_collections.values())))
            self._units = {
                next(names): f"{part} {number}" for number, (part, tests) in enumerate(units) for _ in range(tests)
            }
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]

    def _assign_work_unit(self, node: WorkerController) -> None:
        plain = [unit for unit in self.workqueue if unit.startswith("plain")]
        if plain:
            self.workqueue.move_to_end(plain[0 if node.gateway.id == "gw0" else -1], last=False)
        super()._assign_work_unit(node)


class DurationRecorder:
    """The pytest plugin of ``--record-durations``: what each module takes, into ``tests/durations.json``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "full_matrix" not in report.keywords:
            module = module_of(report.nodeid)
            self._seconds[module] = self._seconds.get(module, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        kept = {module: s for module, s in recorded().items() if (session.config.rootpath / module).exists()}
        merged = kept | {module: round(seconds, 1) for module, seconds in self._seconds.items()}
        DURATIONS.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")
